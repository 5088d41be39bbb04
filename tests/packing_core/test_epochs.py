"""plan_epoch: every epoch holds every document once, in as many rows, and gives every rank as many as the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core.epochs import plan_epoch
from packing_core.errors import CapacityError, PackingError

LENGTHS = np.random.default_rng(0).integers(1, 41, 200)


def tokens_of(rows) -> set[tuple[int, int]]:
    """Every token in the rows as (document, place), each counted once."""
    pieces = list(zip(rows.source.tolist(), rows.start.tolist(), rows.length.tolist(), strict=True))
    tokens = [(source, start + i) for source, start, length in pieces for i in range(length)]
    assert len(tokens) == len(set(tokens))
    return set(tokens)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=6, max_size=60),
    overflow=st.sampled_from(["truncate", "split"]),
    ranks=st.integers(1, 6),
    in_order=st.booleans(),
)
def test_every_epoch_deals_every_document_once_and_as_many_rows(lengths, overflow, ranks, in_order) -> None:
    cut = 20 if overflow == "truncate" else 30
    wanted = {(d, t) for d, length in enumerate(lengths) for t in range(min(length, cut))}
    counts = set()
    for epoch in range(3):
        dealt = plan_epoch(lengths, 20, seed=1, epoch=epoch, overflow=overflow, ranks=ranks, in_order=in_order)
        assert tokens_of(dealt.plan) == wanted
        assert sorted(dealt.steps[dealt.steps < dealt.plan.n_rows].tolist()) == list(range(dealt.plan.n_rows))
        assert dealt.plan.row_tokens.max() <= 20
        counts.add(dealt.plan.n_rows)
    assert len(counts) == 1
    single = (np.diff(dealt.plan.row_offsets) == 1).all()
    assert single or (dealt.steps < dealt.plan.n_rows).all(), "no rank idles while there is a row to cut in two"


def test_a_document_has_other_neighbours_in_every_epoch_and_the_same_in_every_call() -> None:
    def neighbours(epoch: int, seed: int = 0) -> set[frozenset[int]]:
        return {frozenset(row) for row in plan_epoch(LENGTHS, 64, seed=seed, epoch=epoch).plan.to_lists()}

    assert neighbours(1) == neighbours(1)
    assert len(neighbours(0) & neighbours(1)) < 10 and len(neighbours(0) & neighbours(0, seed=1)) < 10


def test_in_order_keeps_the_documents_as_they_come() -> None:
    for epoch in (0, 1):
        dealt = plan_epoch(LENGTHS, 64, seed=0, epoch=epoch, ranks=2, in_order=True)
        assert dealt.plan.source.tolist() == list(range(200))
        assert dealt.steps.reshape(-1).tolist() == list(range(dealt.plan.n_rows))


def test_a_row_of_many_documents_is_cut_for_the_ranks() -> None:
    # One row of 5 documents for 4 ranks: 5 -> 2 3 -> 2 1 2 -> 1 1 1 2
    dealt = plan_epoch([1, 1, 1, 1, 1], 8, seed=0, ranks=4, in_order=True)
    assert np.diff(dealt.plan.row_offsets).tolist() == [1, 1, 1, 2]
    # Three rows of one document each cannot be cut: at the last step one of two ranks has an idle place, 3.
    dealt = plan_epoch([8, 8, 8], 8, seed=0, ranks=2)
    assert sorted(dealt.steps.reshape(-1).tolist()) == [0, 1, 2, 3]


def test_a_long_document_is_named_by_its_place_in_the_data_set() -> None:
    with pytest.raises(CapacityError, match=r'document 3 has 9 tokens and capacity is 8: pass overflow="split"'):
        plan_epoch([2, 3, 4, 9], 8, seed=0)
    with pytest.raises(PackingError, match="the plan has 2 rows and there are 4 ranks"):
        plan_epoch([2, 3], 8, seed=0, ranks=4)
