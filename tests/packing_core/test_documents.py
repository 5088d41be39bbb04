"""One number per document from one per token, whatever the packing: against a loop over the documents' own tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packing_core import LayoutError, PackedBatch, PackingError, pack

# [0 0 0 0 0] [1] [2 2 2 ... 2] [3 3 3] in rows of 8: document 2 is split over rows
LENGTHS = (5, 1, 13, 3)
SENTINEL = 1e6  # what padding holds in these tests


def packed(**options: Any) -> PackedBatch:
    documents = [np.arange(1, n + 1) + 100 * i for i, n in enumerate(LENGTHS)]
    return pack(documents, 8, overflow="split", **options)


def numbers(batch: PackedBatch, *more: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values of a batch's tokens and the same by document."""
    rng = np.random.default_rng(0)
    by_document = [rng.normal(size=(n, *more)) for n in LENGTHS]
    values = np.full((*batch.input_ids.shape, *more), SENTINEL)
    for s, (row, at, n) in enumerate(zip(batch.rows, batch.segment_starts, batch.lengths, strict=True)):
        start = batch.starts[s]
        values[row, at : at + n] = by_document[batch.sources[s]][start : start + n]
    return values, by_document


REFERENCE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
}
PACKINGS = [{"seed": None}, {"seed": 3}, {"seed": None, "strategy": "sequential"}]


@pytest.mark.parametrize("how", REFERENCE)
@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_each_document_is_reduced_over_its_own_tokens(options: dict[str, Any], how: Any) -> None:
    batch = packed(**options)
    for more in ((), (3,)):
        values, by_document = numbers(batch, *more)
        wanted = np.stack([REFERENCE[how](x) for x in by_document])
        np.testing.assert_allclose(batch.reduce(values, how), wanted, rtol=1e-13)
        np.testing.assert_array_equal(batch.reduce(values.reshape(-1, *more), how), batch.reduce(values, how))


@pytest.mark.parametrize("how", REFERENCE)
def test_only_tokens_that_count_are_reduced(how: Any) -> None:
    batch = packed(seed=3)
    values, by_document = numbers(batch)
    counted = values > 0.5
    values[~counted] = np.nan  # not even NaN gets through
    wanted = [REFERENCE[how](x[x > 0.5]) if (x > 0.5).any() else 0.0 for x in by_document]
    assert 0.0 in wanted  # a document of which no token counts is 0
    np.testing.assert_allclose(batch.reduce(values, how, where=counted), wanted, rtol=1e-13)


def test_results_are_in_source_order_and_name_their_documents() -> None:
    batch = packed(seed=3)
    assert batch.sources.tolist() != sorted(batch.sources)
    assert batch.documents.tolist() == [0, 1, 2, 3]
    assert (batch.reduce(batch.input_ids, "first") // 100).tolist() == [0, 1, 2, 3]
    some = batch[[len(batch) - 1]]
    assert (some.reduce(some.input_ids, "last") // 100).tolist() == some.documents.tolist()


def test_a_batch_of_padding_has_no_documents() -> None:
    nothing = np.zeros(0, np.int64)
    batch = PackedBatch(np.zeros((2, 4), np.int64), np.zeros(1, np.int64), nothing, nothing, nothing)
    assert batch.reduce(np.ones((2, 4)), "sum").shape == batch.reduce(np.ones((2, 4)), "last").shape == (0,)
    assert not batch.spread(nothing).any()


def test_what_cannot_be_reduced_is_refused() -> None:
    batch = packed(seed=None)
    with pytest.raises(LayoutError, match=r"values must be \[3, 8, \.\.\.\] or \[24, \.\.\.\], got \[5\]"):
        batch.reduce(np.ones(5), "sum")
    with pytest.raises(PackingError, match="how must be one of 'sum', 'mean', 'last', 'first'; got 'max'"):
        batch.reduce(batch.input_ids, "max")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="where has dtype int64: pass bool"):
        batch.reduce(batch.input_ids, "sum", where=batch.targets)
    with pytest.raises(LayoutError, match=r"values must be \[4, \.\.\.\], one per document, got \[3\]"):
        batch.spread(np.ones(3))
    with pytest.raises(LayoutError, match="document [01] is in this batch twice"):
        pack([[1], [2, 3]], 4, seed=None)[[0, 0]].documents  # noqa: B018


def test_every_token_says_its_document_and_its_place_in_it_also_where_that_is_split():
    batch = packed(seed=3)
    ids, positions = batch.document_ids, batch.document_positions
    for document, length in enumerate(LENGTHS):
        here = ids == document
        assert sorted(positions[here].tolist()) == list(range(length))
        # token n of document i is n + 1 + 100 i
        np.testing.assert_array_equal(batch.input_ids[here], positions[here] + 1 + 100 * document)
    assert (ids[~batch.attention_mask] == -1).all() and not positions[~batch.attention_mask].any()
