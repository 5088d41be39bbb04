"""Attention of segments that continue others: the oracle, isolation, determinism and refusals."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import FLOAT32, ONE_DTYPE, Where
from tests.torch_backend.ops.test_triton_attention import OPTIONS, SMALL, assert_is_the_oracle, drawn
from torch_backend.ops.attention import IMPLEMENTATIONS, attention, triton_work
from torch_backend.ops.attention.triton import TRITON
from torch_backend.segments import PackedMetadata

implementation = import_module("torch_backend.ops.attention.triton")
# a prompt of 19 with an answer of 5 and a turn of 9, two answers of 1 and 20 to that; a document of 8; tiles are of 8
LENGTHS, PARENTS = (19, 5, 9, 1, 20, 8), (-1, 0, 0, 2, 2, -1)
TOKENS = sum(LENGTHS)
CAUSAL = {name: options for name, options in OPTIONS.items() if options.get("causal", True)}
SERVING = ("reference", "sdpa", "triton")
ROOM: dict[str, Any] = {"entries": len(LENGTHS) + 1, "max_seqlen": max(LENGTHS) + 3}  # more than there is


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(TRITON, "supports", TRITON.refuses)
    monkeypatch.setattr(implementation, "choose_tiles", lambda request: SMALL)


def forest(where: Where, **options) -> PackedMetadata:
    return PackedMetadata.from_lengths(LENGTHS, device=where.device, parents=PARENTS, **options)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("options", CAUSAL.values(), ids=CAUSAL)
def test_every_option_is_the_oracle(where, name, options):
    assert_is_that_of_the_paths(where, name, options)


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
def test_the_plain_reference_is_the_oracle(where):
    assert_is_that_of_the_paths(where, "reference", CAUSAL["all at once"])


@pytest.fixture
def short_walks(monkeypatch) -> int:
    """Walks over the queries that see a block of keys are cut after 7 of them."""
    monkeypatch.setattr(triton_work, "SHORTEST", 7)
    monkeypatch.setattr(triton_work, "PROGRAMS", 1_000)
    return 7


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize("options", [CAUSAL[name] for name in ("causal", "all at once")])
def test_walks_over_answers_that_are_cut_are_the_oracle(where, options):
    assert_is_that_of_the_paths(where, "triton", options)


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


def assert_is_that_of_the_paths(where: Where, name: str, options: dict) -> None:
    packed = forest(where, **ROOM)
    assert_is_the_oracle(where, (4, 2, 16, 16), options, LENGTHS, name=name, packed=packed, parents=PARENTS)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", SERVING)
def test_no_segment_moves_another_that_it_does_not_lead_to_by_a_bit(where, name):
    inputs = drawn(where, 4, 2, 16, 16, tokens=TOKENS)[:3]
    packed, starts = forest(where), np.cumsum([0, *LENGTHS])
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
    q, k, v, dout = drawn(where, 4, 2, 16, 16, tokens=TOKENS)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    once, again = (
        torch.autograd.grad(attention(*leaves, forest(where), implementation=name), leaves, dout) for _ in range(2)
    )
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_auto_passes_over_what_knows_documents_alone(where):
    q, k, v = (x.float() for x in drawn(where, 4, 2, 16, 16, tokens=TOKENS)[:3])
    packed = forest(where)
    for name in set(IMPLEMENTATIONS) - set(SERVING):
        with pytest.raises(UnsupportedError, match=rf"{name}: no segments that continue others \(shared prefixes\)"):
            attention(q, k, v, packed, implementation=name)
    torch.testing.assert_close(
        attention(q, k, v, packed), attention(q, k, v, packed, implementation="reference"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_what_would_not_be_exact_is_refused(where):
    q, k, v, _ = drawn(where, 4, 2, 16, 16, tokens=TOKENS)
    with pytest.raises(UnsupportedError, match="no dropout in shared prefixes, whose documents would share one mask"):
        attention(q, k, v, forest(where), dropout=0.1, implementation="sdpa")
    with pytest.raises(LayoutError, match="segments that continue others need causal attention"):
        attention(q, k, v, forest(where), causal=False)
    with pytest.raises(LayoutError, match=r"parents\[1\] is 1: a parent stands before its children"):
        PackedMetadata.from_lengths([2, 3], parents=[-1, 1])


def test_positions_count_on_from_the_parent_on_any_device():
    packed = PackedMetadata.from_lengths((2, 1, 2, 1), parents=(-1, 0, 0, -1), entries=6)
    assert packed.position_ids.tolist() == [0, 1, 2, 2, 3, 0]
    assert packed.to("meta").parents == (-1, 0, 0, -1)
