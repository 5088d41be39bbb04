"""Attention of segments that continue others, and of spans that see both ways: the oracle, isolation, refusals."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import FLOAT32, ONE_DTYPE, Where, assert_isolated, with_gradients
from tests.torch_backend.ops.test_triton_attention import OPTIONS, SMALL, assert_is_the_oracle, drawn
from torch_backend.ops.attention import IMPLEMENTATIONS, attention, triton_work
from torch_backend.ops.attention.flex import block_mask
from torch_backend.ops.attention.triton import TRITON
from torch_backend.segments import PackedMetadata

implementation = import_module("torch_backend.ops.attention.triton")
# a prompt of 19 with an answer of 5 and a turn of 9, two answers of 1 and 20 to that; a document of 8; tiles are of 8
LENGTHS, PARENTS = (19, 5, 9, 1, 20, 8), (-1, 0, 0, 2, 2, -1)
# documents of 5, 30, 1 and 12 tokens. Spans: a whole document and the first tokens of the next, which have the same
# number; one of 11 over two tiles, another right after it; one token; the last tokens of a document.
SPANNED = (5, 30, 1, 12)
NUMBERS = torch.tensor(
    [*[0] * 5, *[0] * 3, -1, -1, *[1] * 11, *[2] * 4, *[-1] * 10, 3, *[-1] * 4, *[4] * 3, *[-1] * 2, *[5] * 3]
)
CAUSAL: dict[str, dict[str, Any]] = {name: each for name, each in OPTIONS.items() if each.get("causal", True)}
SERVING = ("reference", "sdpa", "triton")


class Relation(NamedTuple):
    """A relation between segments, as metadata and as the oracle takes it, and who does not run it."""

    lengths: tuple[int, ...]
    relation: dict[str, Any]
    others: set[str]
    reason: str

    def on(self, where: Where, **options: Any) -> PackedMetadata:
        parents = self.relation.get("parents")
        packed = PackedMetadata.from_lengths(self.lengths, device=where.device, parents=parents, **options)
        return packed if parents is not None else packed.with_spans(self.relation["spans"].to(where.device))


SHARED, BOTH_WAYS = (
    r"no segments that continue others \(shared prefixes\)", r"no spans that see both ways \(images, prefixes\)"
)  # fmt: skip
FOREST = Relation(LENGTHS, {"parents": PARENTS}, {*IMPLEMENTATIONS} - {*SERVING}, SHARED)
SPANS = Relation(SPANNED, {"spans": NUMBERS}, {*IMPLEMENTATIONS} - {*SERVING, "flex"}, BOTH_WAYS)
RELATIONS = pytest.mark.parametrize("relation", [FOREST, SPANS], ids=["forest", "spans"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRITON, "supports", TRITON.refuses)
    monkeypatch.setattr(implementation, "choose_tiles", lambda request: SMALL)


def assert_is_that_of(relation: Relation, where: Where, name: str, options: dict[str, Any]) -> None:
    lengths = relation.lengths
    packed = relation.on(where, entries=len(lengths) + 1, max_seqlen=max(lengths) + 3)  # more room than is needed
    assert_is_the_oracle(where, (4, 2, 16, 16), options, lengths, name=name, packed=packed, **relation.relation)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("options", CAUSAL.values(), ids=CAUSAL)
@RELATIONS
def test_every_option_is_the_oracle(relation: Relation, where: Where, name: str, options: dict[str, Any]) -> None:
    assert_is_that_of(relation, where, name, options)


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
@RELATIONS
def test_the_plain_reference_is_the_oracle(relation: Relation, where: Where) -> None:
    assert_is_that_of(relation, where, "reference", CAUSAL["all at once"])


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@RELATIONS
def test_auto_passes_over_what_knows_documents_alone(relation: Relation, where: Where) -> None:
    q, k, v = (x.float() for x in drawn(where, 4, 2, 16, 16, tokens=sum(relation.lengths))[:3])
    packed = relation.on(where)
    for name in relation.others:
        with pytest.raises(UnsupportedError, match=f"{name}: {relation.reason}"):
            attention(q, k, v, packed, implementation=name)
    found = attention(q, k, v, packed)
    torch.testing.assert_close(found, attention(q, k, v, packed, implementation="reference"), rtol=1e-4, atol=1e-4)
    if packed.spans is not None:
        plain = attention(q, k, v, packed.without_spans)
        assert torch.equal(plain, attention(q, k, v, PackedMetadata.from_lengths(SPANNED, device=where.device)))
        assert not torch.equal(plain, found)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_what_would_not_be_exact_is_refused(where: Where) -> None:
    q, k, v, _ = drawn(where, 4, 2, 16, 16, tokens=sum(LENGTHS))
    with pytest.raises(UnsupportedError, match="no dropout in shared prefixes, whose documents would share one mask"):
        attention(q, k, v, FOREST.on(where), dropout=0.1, implementation="sdpa")
    with pytest.raises(LayoutError, match="segments that continue others need causal attention"):
        attention(q, k, v, FOREST.on(where), causal=False)
    with pytest.raises(LayoutError, match=r"parents\[1\] is 1: a parent stands before its children"):
        PackedMetadata.from_lengths([2, 3], parents=[-1, 1])
    q, k, v, _ = drawn(where, 4, 2, 16, 16, tokens=sum(SPANNED))
    with pytest.raises(LayoutError, match="spans need causal attention: without it every token sees both ways"):
        attention(q, k, v, SPANS.on(where), causal=False)
    both = PackedMetadata.from_lengths(SPANNED, device=where.device, parents=(-1, 0, -1, -1))
    with pytest.raises(LayoutError, match="spans have no place where segments continue others"):
        attention(q, k, v, both.with_spans(NUMBERS.to(where.device)))


# -- segments that continue others -------------------------------------------------------------------------------------


@pytest.fixture
def short_walks(monkeypatch) -> int:
    """Walks over the queries that see a block of keys are cut after 7 of them."""
    monkeypatch.setattr(triton_work, "SHORTEST", 7)
    monkeypatch.setattr(triton_work, "PROGRAMS", 1_000)
    return 7


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize("options", [CAUSAL[name] for name in ("causal", "all at once")])
def test_walks_over_answers_that_are_cut_are_the_oracle(where, options):
    assert_is_that_of(FOREST, where, "triton", options)


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize("where", ONE_DTYPE[1:], indirect=True)  # an interpreter runs programs in one order
def test_gradients_of_walks_that_are_cut_repeat_to_the_bit(where):
    assert_repeats(where, "triton")


def test_shares_cover_each_walk_once_and_no_more_than_are_asked_for_are_cut(short_walks, monkeypatch):
    packed = PackedMetadata.from_lengths(LENGTHS, parents=PARENTS)
    shares: dict[tuple[int, int], list[list[int]]] = {}
    for first, _, block, *_, begin, end, place in triton_work.key_tiles(packed, 4).tolist():
        shares.setdefault((first, block), []).append([begin, end, place])
    assert len(shares) == sum(-(-length // 4) for length in LENGTHS)
    # the queries of a segment and of those that continue it
    walks = dict(zip(np.cumsum([0, *LENGTHS[:-1]]).tolist(), (54, 5, 30, 1, 20, 8), strict=True))
    places = []
    for (first, block), found in shares.items():
        assert [begin for begin, _, _ in found] == list(range(block, walks[first], short_walks))
        assert all(end - begin == short_walks for begin, end, _ in found)
        assert (len(found) == 1) == (found[0][2] == -1)
        places += [place for *_, place in found if place >= 0]
    sums = triton_work.key_sums(packed, 4)
    assert sorted(places) == list(range(len(sums))) and int(sums[:, 3].sum()) == len(sums)
    monkeypatch.setattr(triton_work, "PROGRAMS", 4)  # of 2 heads, so a walk is at most half of all
    whole = PackedMetadata.from_lengths(LENGTHS, parents=PARENTS)
    assert len(triton_work.key_tiles(whole, 4, 2)) == len(shares) and not triton_work.key_sums(whole, 4, 2).any()


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", SERVING)
def test_no_segment_moves_another_that_it_does_not_lead_to_by_a_bit(where, name):
    inputs = drawn(where, 4, 2, 16, 16, tokens=sum(LENGTHS))[:3]
    packed, starts = FOREST.on(where), np.cumsum([0, *LENGTHS])
    before = attention(*inputs, packed, implementation=name)
    sees = {(0,): {0, 1, 2, 3, 4}, (1, 5): {1, 5}, (2,): {2, 3, 4}, (3,): {3}}
    for segments, below in sees.items():
        changed = [x.clone() for x in inputs]
        for x in changed:
            for segment in segments:
                x[starts[segment] : starts[segment + 1]] = float("nan")
        after = attention(*changed, packed, implementation=name)
        for other in range(len(LENGTHS)):
            part = slice(starts[other], starts[other + 1])
            assert torch.equal(after[part], before[part]) == (other not in below), (segments, other)


@pytest.mark.parametrize("where", ONE_DTYPE[1:], indirect=True)
@pytest.mark.parametrize("name", SERVING)
def test_gradients_repeat_to_the_bit(where, name):
    assert_repeats(where, name)


def assert_repeats(where: Where, name: str) -> None:
    q, k, v, dout = drawn(where, 4, 2, 16, 16, tokens=sum(LENGTHS))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    once, again = (
        torch.autograd.grad(attention(*leaves, FOREST.on(where), implementation=name), leaves, dout) for _ in range(2)
    )
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)


def test_positions_count_on_from_the_parent_on_any_device():
    packed = PackedMetadata.from_lengths((2, 1, 2, 1), parents=(-1, 0, 0, -1), entries=6)
    assert packed.position_ids.tolist() == [0, 1, 2, 2, 3, 0]
    assert packed.to("meta").parents == (-1, 0, 0, -1)


# -- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("window", [None, 7])
def test_flex_is_the_plain_reference(where: Where, window: int | None) -> None:
    q, k, v, _ = drawn(where, 4, 2, 16, 16, tokens=sum(SPANNED))
    found, right = (
        attention(q, k, v, SPANS.on(where), window=window, implementation=name) for name in ("flex", "reference")
    )
    torch.testing.assert_close(found, right, rtol=2e-2 if where.dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("window", [None, 200])
def test_the_block_mask_leaves_out_no_visible_block_and_takes_none_whole_that_is_not(window: int | None) -> None:
    lengths = (300, 500, 224)
    numbers = torch.full((1024,), -1)
    numbers[120:260] = 0
    numbers[400:800] = 1
    packed = PackedMetadata.from_lengths(lengths).with_spans(numbers)
    mask = block_mask(packed, causal=True, window=window)
    places = torch.arange(1024)
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places).view(8, 128, 8, 128)
    some, every = seen.any(3).any(1), seen.all(3).all(1)
    partly, wholly = (torch.zeros(8, 8, dtype=torch.bool) for _ in range(2))
    for rows, counts, order in (
        (partly, mask.kv_num_blocks, mask.kv_indices),
        (wholly, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for block in range(8):
            rows[block, order[0, 0, block, : counts[0, 0, block]].long()] = True
    assert torch.equal(partly | wholly, some)
    assert not (wholly & ~every).any() and wholly.any()


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", SERVING)
def test_no_segment_moves_another_with_spans_by_a_bit(where: Where, name: str) -> None:
    *inputs, dout = drawn(where, 4, 2, 16, 16, tokens=sum(SPANNED))
    packed = SPANS.on(where)

    def run() -> list[torch.Tensor]:
        return with_gradients(partial(attention, packed=packed, implementation=name), inputs, dout)

    for x, y in zip(run(), run(), strict=True):
        assert torch.equal(x, y)
    assert_isolated(run, [*inputs, dout], slice(sum(SPANNED[:1]), sum(SPANNED[:2])))


def test_a_span_ends_with_its_segment_and_follows_the_segments_to_another_device() -> None:
    spans = PackedMetadata.from_lengths([3, 3]).with_spans(torch.tensor([-1, 0, 0, 0, 0, 1])).spans
    assert spans is not None
    assert spans.begin.tolist() == [0, 1, 1, 3, 3, 5] and spans.end.tolist() == [1, 3, 3, 5, 5, 6]
    moved = PackedMetadata.from_lengths([3, 3]).with_spans(torch.zeros(6, dtype=torch.long)).to("meta")
    assert moved.spans is not None and moved.spans.end.device.type == "meta"
    assert moved.without_spans.spans is None
