"""Causal attention in which spans of tokens see each other both ways: the oracle, isolation, determinism, refusals."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import FLOAT32, ONE_DTYPE, Where
from tests.torch_backend.ops.test_triton_attention import OPTIONS, SMALL, assert_is_the_oracle, drawn
from torch_backend.ops.attention import IMPLEMENTATIONS, attention
from torch_backend.ops.attention.flex import block_mask
from torch_backend.ops.attention.triton import TRITON
from torch_backend.segments import PackedMetadata

implementation = import_module("torch_backend.ops.attention.triton")
# documents of 5, 30, 1 and 12 tokens; tiles are of 8. Spans: a whole document and the first tokens of the next, which
# have the same number; one of 11 over two tiles, another right after it; one token; the last tokens of a document.
LENGTHS = (5, 30, 1, 12)
TOKENS = sum(LENGTHS)
SPANS = torch.tensor(
    [*[0] * 5, *[0] * 3, -1, -1, *[1] * 11, *[2] * 4, *[-1] * 10, 3, *[-1] * 4, *[4] * 3, *[-1] * 2, *[5] * 3]
)
CAUSAL: dict[str, dict[str, Any]] = {name: each for name, each in OPTIONS.items() if each.get("causal", True)}
SERVING = ("reference", "sdpa", "triton")
ALL = {*SERVING, "flex"}
ROOM: dict[str, Any] = {"entries": len(LENGTHS) + 1, "max_seqlen": max(LENGTHS) + 3}  # more than there is


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRITON, "supports", TRITON.refuses)
    monkeypatch.setattr(implementation, "choose_tiles", lambda request: SMALL)


def with_spans(where: Where, **options: Any) -> PackedMetadata:
    return PackedMetadata.from_lengths(LENGTHS, device=where.device, **options).with_spans(SPANS.to(where.device))


def assert_is_that_of_spans(where: Where, name: str, options: dict[str, Any]) -> None:
    packed = with_spans(where, **ROOM)
    assert_is_the_oracle(where, (4, 2, 16, 16), options, LENGTHS, name=name, packed=packed, spans=SPANS)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("options", CAUSAL.values(), ids=CAUSAL)
def test_every_option_is_the_oracle(where: Where, name: str, options: dict[str, Any]) -> None:
    assert_is_that_of_spans(where, name, options)


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
def test_the_plain_reference_is_the_oracle(where: Where) -> None:
    assert_is_that_of_spans(where, "reference", CAUSAL["all at once"])


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("window", [None, 7])
def test_flex_is_the_plain_reference(where: Where, window: int | None) -> None:
    q, k, v, _ = drawn(where, 4, 2, 16, 16, tokens=TOKENS)
    found, right = (
        attention(q, k, v, with_spans(where), window=window, implementation=name) for name in ("flex", "reference")
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
def test_no_segment_moves_another_by_a_bit(where: Where, name: str) -> None:
    inputs = drawn(where, 4, 2, 16, 16, tokens=TOKENS)
    packed = with_spans(where)

    def run() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = attention(*leaves, packed, implementation=name)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    before, again = run(), run()
    start, stop = sum(LENGTHS[:1]), sum(LENGTHS[:2])
    for x in inputs:
        x[start:stop] = float("nan")
    for x, y, z in zip(before, again, run(), strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x[:start], z[:start]) and torch.equal(x[stop:], z[stop:])
        assert not torch.equal(x[start:stop], z[start:stop])


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_auto_passes_over_what_knows_causal_attention_alone(where: Where) -> None:
    q, k, v = (x.float() for x in drawn(where, 4, 2, 16, 16, tokens=TOKENS)[:3])
    packed = with_spans(where)
    for name in set(IMPLEMENTATIONS) - ALL:
        with pytest.raises(UnsupportedError, match=rf"{name}: no spans that see both ways \(images, prefixes\)"):
            attention(q, k, v, packed, implementation=name)
    torch.testing.assert_close(
        attention(q, k, v, packed), attention(q, k, v, packed, implementation="reference"), rtol=1e-4, atol=1e-4
    )
    plain = attention(q, k, v, packed.without_spans)
    assert torch.equal(plain, attention(q, k, v, PackedMetadata.from_lengths(LENGTHS, device=where.device)))
    assert not torch.equal(plain, attention(q, k, v, packed))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_what_would_not_be_exact_is_refused(where: Where) -> None:
    q, k, v, _ = drawn(where, 4, 2, 16, 16, tokens=TOKENS)
    with pytest.raises(LayoutError, match="spans need causal attention: without it every token sees both ways"):
        attention(q, k, v, with_spans(where), causal=False)
    with pytest.raises(LayoutError, match="spans have no place where segments continue others"):
        attention(q, k, v, with_spans(where, parents=(-1, 0, -1, -1)))


def test_a_span_ends_with_its_segment_and_follows_the_segments_to_another_device() -> None:
    spans = PackedMetadata.from_lengths([3, 3]).with_spans(torch.tensor([-1, 0, 0, 0, 0, 1])).spans
    assert spans is not None
    assert spans.begin.tolist() == [0, 1, 1, 3, 3, 5] and spans.end.tolist() == [1, 3, 3, 5, 5, 6]
    moved = PackedMetadata.from_lengths([3, 3]).with_spans(torch.zeros(6, dtype=torch.long)).to("meta")
    assert moved.spans is not None and moved.spans.end.device.type == "meta"
    assert moved.without_spans.spans is None
