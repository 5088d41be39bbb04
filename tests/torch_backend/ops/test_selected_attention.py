"""Selection of keys inside the documents of a row, and attention over what was selected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.torch_backend.models import error
from torch_backend.ops.attention import AttentionRequest, request_of
from torch_backend.ops.attention import selected as selected_keys
from torch_backend.ops.attention.selected import (
    LongDocuments,
    SelectedKeys,
    select,
    select_blocks,
    select_pooled,
    selected_attention,
)
from torch_backend.segments import PackedMetadata

LENGTHS = (5, 12, 1, 9, 4, 13)  # of which 5, 12, 9 and 13 are above a budget of 4
BUDGET = 4


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sum(LENGTHS), *each, generator=generator, dtype=dtype) for each in shapes]


def long_documents(packed: PackedMetadata) -> LongDocuments:
    long = LongDocuments.of(packed, BUDGET)
    assert long is not None
    return long


@pytest.mark.parametrize("by_number", [("cpu",), ()], ids=["as a CPU", "as a GPU"])
def test_the_best_keys_are_those_of_the_document_alone(
    monkeypatch: pytest.MonkeyPatch, by_number: tuple[str, ...]
) -> None:
    monkeypatch.setattr(selected_keys, "_SCORES_ON_CPU", 60)  # some queries at a time
    monkeypatch.setattr(selected_keys, "_BY_NUMBER", by_number)
    long = long_documents(PackedMetadata.from_lengths(LENGTHS))
    q, k, weights = operands((2, 8), (8,), (2,))
    q, k = q.abs(), k.abs()  # no score is 0, as several would be
    selected = select(q, k, weights, long, top_k=BUDGET).split(long.lengths)
    places = long.places.split(long.lengths)
    assert [len(each) for each in selected] == [5, 12, 9, 13]
    for chosen, document in zip(selected, places, strict=True):
        products = torch.einsum("ihd,jd->hij", q[document], k[document])
        scores = torch.einsum("ih,hij->ij", weights[document], products.relu())
        for i in range(len(document)):
            best = scores[i, : i + 1].argsort(descending=True)[:BUDGET]
            assert sorted(chosen[i].tolist()) == sorted([-1] * (BUDGET - len(best)) + best.tolist())


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("at_once", [1, 2**22])
def test_attention_is_that_over_the_selected_keys(
    monkeypatch: pytest.MonkeyPatch, at_once: int, options: dict[str, float]
) -> None:
    monkeypatch.setattr(selected_keys, "_SCORES_ON_CPU", at_once)
    packed = PackedMetadata.from_lengths(LENGTHS)
    long = long_documents(packed)
    index_q, index_k, weights = operands((2, 8), (8,), (2,))
    chosen = select(index_q, index_k, weights, long, top_k=BUDGET)
    q, k, v = (x.requires_grad_() for x in operands((4, 8), (2, 8), (2, 6)))
    sinks = torch.linspace(-1, 1, 4, dtype=q.dtype).requires_grad_() if options.pop("sinks", False) else None
    visible = packed.seq_idx[:, None] == packed.seq_idx
    visible &= packed.position_ids[:, None] >= packed.position_ids
    for token, own in zip(long.places.tolist(), chosen.tolist(), strict=True):
        start = token - int(packed.position_ids[token])
        visible[token] = False
        visible[token, [start + place for place in own if place >= 0]] = True
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) * 8**-0.5
    if options:
        scores = 3 * torch.tanh(scores / 3)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(4, 1, 1).expand(4, len(q), 1)], -1)
    want = torch.einsum("hij,jhe->ihe", scores.softmax(-1)[..., : len(q)], v.repeat_interleave(2, 1))
    request: AttentionRequest = request_of(q, k, v, packed, sinks=sinks, **options)  # type: ignore[arg-type]
    out = selected_attention(q, k, v, SelectedKeys(chosen, long, request, sinks))
    assert error(out, want) <= 1e-12
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    gradient = torch.randn(want.shape, dtype=want.dtype)
    pairs = zip(*(torch.autograd.grad(x, leaves, gradient) for x in (out, want)), strict=True)
    assert all(error(got, exact) <= 1e-12 for got, exact in pairs)


@pytest.mark.parametrize("by_number", [("cpu",), ()], ids=["as a CPU", "as a GPU"])
def test_the_best_blocks_are_those_of_the_document_alone(
    monkeypatch: pytest.MonkeyPatch, by_number: tuple[str, ...]
) -> None:
    """Three groups choose two blocks of two keys each, their own first; and one group among blocks that have ended."""
    monkeypatch.setattr(selected_keys, "_SCORES_ON_CPU", 60)
    monkeypatch.setattr(selected_keys, "_BY_NUMBER", by_number)
    long = LongDocuments.of(PackedMetadata.from_lengths(LENGTHS), BUDGET, block=2)
    assert long is not None
    q, k = operands((3, 8), (8,))
    k = k.abs()  # no score of one head is 0 for positive queries
    documents = long.places.split(long.lengths)
    selected = select_blocks(q, k, long, top_k=2, local=1).split(long.lengths)
    pooled = [k[document][: len(document) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for document in documents]
    ended = select_pooled(q.abs()[:, :1], pooled, long, top_k=2).split(long.lengths)
    for chosen, earlier, document, keys in zip(selected, ended, documents, pooled, strict=True):
        scores = torch.einsum("ihd,jd->hij", q[document], k[document])
        means = q.abs()[document, 0] @ keys.T
        for i in range(len(document)):
            for group in range(3):
                of_blocks = [float(part.max()) for part in scores[group, i, : i + 1].split(2)]
                best = sorted(range(len(of_blocks) - 1), key=lambda block: -of_blocks[block])[:1]
                assert set(chosen[i, group].tolist()) - {-1} == {*best, i // 2}
            best = means[i, : (i + 1) // 2].argsort(descending=True)[:2].tolist()
            assert sorted(earlier[i, 0, :2].tolist()) == sorted([-1] * (2 - len(best)) + best)
            assert earlier[i, 0, 2] == (i + 1) // 2


def test_documents_within_the_budget_are_none() -> None:
    assert LongDocuments.of(PackedMetadata.from_lengths((4, 4)), 4) is None
    assert LongDocuments.of(PackedMetadata.from_lengths((4, 4), max_seqlen=64), 4) is None
    padded = PackedMetadata.from_lengths((4, 9))
    assert LongDocuments.of(padded, 4, [[0]]) is None
    assert LongDocuments.of(padded, 4, [[0], [1]]).lengths == (9,)  # type: ignore[union-attr]


def test_all_documents_may_be_above_the_budget() -> None:
    long = LongDocuments.of(PackedMetadata.from_lengths((2, 3)), 1)
    assert long is not None and long.rest is None and long.order.tolist() == list(range(5))
