"""torch_backend.reduce and spread equal the numpy reference of the same batch, with gradients, whatever the packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from packing_core import LayoutError, PackedBatch, PackingError, pack
from packing_core.batches.select import without_padding
from torch_backend import PackedCollator, reduce, spread, with_boundaries

HOW = ("sum", "mean", "first", "last")


def packed(**options: Any) -> PackedBatch:
    """Four documents, of which the third is split over rows."""
    documents = [np.arange(1, n + 1) for n in (5, 1, 13, 3)]
    return pack(documents, 8, overflow="split", prompt_lengths=[2, 1, 4, 0], **options)


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("options", [{"seed": None}, {"seed": 3}, {"seed": 8, "strategy": "best_fit"}], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_reduction_equals_the_reference(how: Any, options: dict[str, Any], padding_free: bool) -> None:
    source = packed(**options)
    batch = PackedCollator(padding_free=padding_free)(source)
    if padding_free:
        source = PackedBatch(**without_padding(source))
    trained = batch["labels"] != -100
    for shape in (source.input_ids.shape, (*source.input_ids.shape, 3)):
        values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for where in (None, trained):
            found = reduce(values, batch, how, where=where)
            wanted = source.reduce(values.detach().numpy(), how, where=None if where is None else where.numpy())
            torch.testing.assert_close(found.detach().numpy(), wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(reduce(values.flatten(0, 1), batch, how, where=where), found, rtol=0, atol=0)
            # the gradient of a linear function: the reduction of each basis vector, here of random directions
            cotangent = torch.randn_like(found)
            (gradient,) = torch.autograd.grad(found, values, cotangent)
            direction = torch.randn_like(values)
            moved = source.reduce(direction.numpy(), how, where=None if where is None else where.numpy())
            assert (gradient * direction).sum().item() == pytest.approx((cotangent.numpy() * moved).sum(), rel=1e-9)


def test_documents_without_a_token_that_counts_are_zero_and_send_no_gradient() -> None:
    batch = PackedCollator(capacity=8)(
        [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    )
    trained = batch["labels"] != -100  # the only token of the second document is the first of its segment
    for how in HOW:
        values = torch.full((1, 8), float("nan")).masked_fill(trained, 2.0).requires_grad_()
        found = reduce(values, batch, how, where=trained)
        assert found.tolist() == [4.0 if how == "sum" else 2.0, 0.0]
        found.sum().backward()
        assert values.grad is not None and not values.grad[~trained].any()


def test_documents_come_in_the_order_of_the_features() -> None:
    features = [{"input_ids": [number] * length} for number, length in enumerate((2, 7, 1, 5, 3), start=10)]
    batch = PackedCollator(capacity=8, strategy="best_fit")(features)
    assert batch["input_ids"][0, 0] != 10  # best fit puts the longest first
    assert reduce(batch["input_ids"], batch, "first").tolist() == [10, 11, 12, 13, 14]
    assert len(batch["packed_documents"]) == 5


def test_under_another_collator_documents_are_its_segments_without_padding() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 9, 9]])
    batch = with_boundaries(dict)({"input_ids": ids, "segment_ids": torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])})
    assert batch["packed_documents"] == ((0,), (1,), (3,), (4,))
    assert reduce(ids, batch, "sum").tolist() == [11, 7, 8, 27]


def test_sums_of_long_documents_keep_the_differences_of_log_probabilities() -> None:
    batch = PackedCollator()([{"input_ids": [1] * 50_000}])
    values = torch.full((1, 50_000), -2.7182818)
    assert reduce(values, batch, "sum").item() == pytest.approx(-2.7182818 * 50_000, rel=2e-7)


def test_half_precision_is_summed_in_float32() -> None:
    batch = PackedCollator()([{"input_ids": [1] * 3000}])
    values = torch.ones(1, 3000, 2, dtype=torch.bfloat16)
    assert reduce(values, batch, "sum").tolist() == [[3000.0, 3000.0]]
    assert reduce(values, batch, "last").dtype == torch.bfloat16


def test_spread_is_the_adjoint_of_the_sum() -> None:
    batch = PackedCollator()(packed(seed=3))
    per_document = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    per_token = torch.randn(*batch["input_ids"].shape, 2, dtype=torch.float64)
    out = spread(per_document, batch)
    (gradient,) = torch.autograd.grad(out, per_document, per_token)
    torch.testing.assert_close(gradient, reduce(per_token, batch, "sum"))


def test_what_cannot_be_reduced_is_refused() -> None:
    batch = PackedCollator()(packed(seed=3))
    with pytest.raises(LayoutError, match=r"values must be \[3, 8, \.\.\.\] or \[24, \.\.\.\], got \[7\]"):
        reduce(torch.zeros(7), batch, "sum")
    with pytest.raises(PackingError, match="how must be one of"):
        reduce(batch["input_ids"], batch, "median")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="where must be bool"):
        reduce(batch["input_ids"], batch, "sum", where=batch["labels"])
    with pytest.raises(LayoutError, match=r"values must be \[4, \.\.\.\], one per document, got \[3\]"):
        spread(torch.zeros(3), batch)
    twice = PackedCollator()(pack([[1], [2, 3]], 4, seed=None)[[0, 0]])
    with pytest.raises(LayoutError, match="if a document is in the batch twice, make a batch of its own"):
        reduce(twice["input_ids"], twice, "sum")
