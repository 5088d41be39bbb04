"""plan_epoch(equal_cost=True): the ranks of each step cost the same, and every document stands in the rows once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core import Cost
from packing_core.errors import PackingError
from packing_core.planning.epochs import plan_epoch, plan_steps
from packing_core.planning.equal_cost import equal_cost_rows

SQUARES = Cost(tokens=1, squares=1e-3)


def tail(count: int, capacity: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(capacity / 16) - 1.4**2 / 2, 1.4, count)
    return drawn.clip(1, capacity).astype(np.int64)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    ranks=st.integers(1, 6),
    steps=st.integers(1, 12),
    limit=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    cost=st.sampled_from([Cost(), SQUARES, Cost(tokens=0, squares=1), Cost(tokens=0, squares=0, windows=((4, 1.0),))]),
)
def test_rows_hold_every_piece_once_within_the_capacity_or_there_are_none(lengths, ranks, steps, limit, seed, cost):
    def made():
        shuffle = None if seed is None else np.random.PCG64(seed)
        return equal_cost_rows(np.array(lengths), 30, limit, ranks * steps, ranks, cost, shuffle)

    rows = made()
    if rows is None:
        most = ranks * steps * min(limit or 60, 30 // lengths[0])
        assert len(set(lengths)) > 1 or not ranks * steps <= len(lengths) <= most, "equal pieces fit if they can"
        return
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    assert rows.sizes.tolist() == [lengths[piece] for piece in rows.order]
    assert len(rows.counts) == ranks * steps and rows.counts.min() >= 1 and rows.counts.max() <= (limit or 60)
    assert np.add.reduceat(rows.sizes, rows.offsets[:-1]).max() <= 30
    assert all((mine == again).all() for mine, again in zip(rows, made(), strict=True))


@pytest.mark.parametrize("cost", [Cost(tokens=1, squares=4e-5), Cost(tokens=1, squares=0, windows=((4096, 1e-4),))])
def test_steps_with_long_documents_are_even_where_mixed_rows_are_not(cost):
    ranks = 8
    lengths = tail(150 * ranks, 32_768)
    options = {"seed": 1, "epoch": 2, "ranks": ranks, "cost": cost}
    mixed, even = (plan_epoch(lengths, 32_768, equal_cost=equal, **options) for equal in (False, True))
    assert even.plan.n_rows == mixed.plan.n_rows and even.plan.n_rows % ranks == 0
    assert even.imbalance < 1.03 < mixed.imbalance
    assert sorted(even.plan.source.tolist()) == list(range(len(lengths)))
    assert even.plan == plan_epoch(lengths, 32_768, equal_cost=True, **options).plan


def test_rows_that_are_even_or_cannot_be_levelled_stay_mixed():
    for lengths in (np.full(400, 100), np.array([512, *[300] * 15])):
        mixed, even = (plan_epoch(lengths, 512, seed=0, ranks=4, cost=SQUARES, equal_cost=e) for e in (False, True))
        assert even.plan == mixed.plan and (even.steps == mixed.steps).all()


def test_a_step_beside_a_long_document_holds_the_next_longest_ones():
    # Two ranks, rows of 8: 8 | 7 and 1, then 4 3 | 4 3; by falling length in rows of their own, 4 would meet 8.
    rows = equal_cost_rows(np.array([8, 7, 4, 4, 3, 3, 1]), 8, None, 4, 2, Cost(tokens=0, squares=1), None)
    held = [sorted(rows.sizes[a:b].tolist()) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
    assert held == [[8], [1, 7], [3, 4], [3, 4]]


def test_pieces_of_one_length_change_places_from_epoch_to_epoch():
    lengths = np.repeat([30, 20, 11, 5, 3], [2, 6, 10, 20, 40])
    one, other = (plan_epoch(lengths, 32, seed=0, epoch=e, ranks=4, cost=SQUARES, equal_cost=True) for e in (0, 1))
    assert one.plan.n_rows == other.plan.n_rows
    assert {frozenset(row) for row in one.plan.to_lists()} != {frozenset(row) for row in other.plan.to_lists()}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"in_order": True}, "in_order=True keeps the order of the documents: leave it or equal_cost=True out"),
        ({"order": "curriculum"}, 'equal_cost=True chooses the rows of a step by cost: leave it or order="curric'),
    ],
)
def test_an_order_of_the_documents_is_refused(given, says):
    with pytest.raises(PackingError, match=says):
        plan_epoch([1, 2, 3], 8, seed=0, equal_cost=True, **given)


def test_steps_are_those_of_an_epoch_with_a_rank_for_each_row_one_after_the_other():
    lengths, given = tail(1200, 32_768), {"seed": 1, "cost": Cost(tokens=1, squares=4e-5)}
    steps = plan_steps(lengths, 32_768, 6, epoch=1, **given)
    dealt = plan_epoch(lengths, 32_768, ranks=6, epoch=1, equal_cost=True, **given)
    assert steps.to_lists() == [dealt.plan.to_lists()[row] for row in dealt.steps.reshape(-1)]
    costs = given["cost"].of_rows(steps).reshape(-1, 6)
    assert costs.max(axis=1).sum() < 1.03 * costs.mean(axis=1).sum()
    with pytest.raises(PackingError, match="there are 2 documents and rows_per_step=3: lower it, or leave equal_cost"):
        plan_steps([5, 4], 8, 3, seed=0)
    assert plan_steps([5, 4], 4, 3, seed=0, overflow="split").n_rows == 3, "pieces count"


def test_a_cost_that_is_none_is_refused_whatever_the_ranks():
    with pytest.raises(PackingError, match="cost is 3: pass Cost"):
        plan_epoch([1, 2, 3], 8, seed=0, cost=3)


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": None}, {"seed": 0, "epoch": -1}, {"seed": 0, "epoch": 1.5}])
def test_a_seed_or_an_epoch_that_is_no_count_is_refused(wrong):
    with pytest.raises(PackingError, match="must be an integer of at least 0, got"):
        plan_epoch([1, 2, 3], 8, **wrong)
