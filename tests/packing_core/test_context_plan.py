"""context_plan: every token once, whole documents where there is room, and ranks that finish together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core.errors import PackingError
from packing_core.planning.context import ContextPlan, context_plan
from packing_core.planning.cost import Cost

RANKS = (2, 4, 8, 64)
WINDOWS = Cost(1, 1e-4, windows=((1024, 1e-3), (4096, 1e-3)))
costs = st.sampled_from([Cost(), Cost(1, 0), Cost(0, 1), Cost(1, 0.1), Cost(1, 0.1, ((7, 1.0), (60, 0.3))), WINDOWS])


def heavy_tail(tokens: int, seed: int) -> np.ndarray:
    """Lengths that fill a row, in the shape of source files: median 1,200 and mean 4,000."""
    drawn = np.random.default_rng(seed).lognormal(np.log(1200), 1.55, tokens // 200).astype(np.int64)
    ends = np.cumsum(np.clip(drawn, 1, tokens))
    count = int(np.searchsorted(ends, tokens))
    return np.diff([0, *ends[:count], tokens])


def held(plan: ContextPlan) -> list[tuple[int, int]]:
    """(document, position) of all tokens of all ranks, in the order of the documents."""
    found = []
    for rank in range(plan.ranks):
        pieces = plan.of_rank(rank)
        documents = np.repeat(plan.document[pieces], plan.length[pieces])
        found += zip(documents.tolist(), plan.positions(rank).tolist(), strict=True)
    return sorted(found)


@given(
    lengths=st.lists(st.integers(1, 40) | st.integers(1, 400), min_size=1, max_size=20),
    ranks=st.integers(1, 9),
    cost=costs,
    contiguous=st.booleans(),
)
def test_every_token_is_on_one_rank_and_every_rank_has_some(lengths, ranks, cost, contiguous) -> None:
    if sum(lengths) < ranks:
        return
    plan = context_plan(lengths, ranks, cost=cost, contiguous=contiguous)
    assert held(plan) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    assert sorted(np.concatenate([plan.tokens(rank) for rank in range(ranks)]).tolist()) == list(range(sum(lengths)))
    assert all(len(plan.tokens(rank)) for rank in range(ranks))
    assert plan.length.min() >= 1
    ends = list(zip(plan.rank, plan.document, plan.start + plan.length, strict=True))
    assert not set(ends) & set(zip(plan.rank, plan.document, plan.start, strict=True))  # adjacent pieces are one
    for document in range(len(lengths)):
        pieces = plan.pieces(document)
        ends = plan.start[pieces] + plan.length[pieces]
        assert plan.start[pieces].tolist() == [0, *ends[:-1]] and ends[-1] == lengths[document]
        assert plan.straddling[document] == (len(set(plan.rank[pieces].tolist())) > 1)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("tokens", [65_536, 262_144, 1_048_576])
def test_ranks_finish_together_on_heavy_tailed_documents(tokens: int, ranks: int, contiguous: bool) -> None:
    for seed in range(5):
        plan = context_plan(heavy_tail(tokens, seed), ranks, contiguous=contiguous)
        assert plan.imbalance <= 1.03


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_document_longer_than_everything_else_is_cut_evenly(ranks: int, contiguous: bool) -> None:
    assert context_plan([1_048_576, 300, 20], ranks, contiguous=contiguous).imbalance <= 1.05


@pytest.mark.parametrize("cost", [WINDOWS, Cost(1, 0, ((4096, 1e-3),)), Cost(0, 0, ((4096, 1.0),))])
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_first_tokens_of_a_document_see_less_than_a_window_and_count_for_less(contiguous: bool, cost: Cost) -> None:
    for ranks in RANKS[:3]:
        assert context_plan([20_000, 30], ranks, cost=cost, contiguous=contiguous).imbalance <= 1.005


@pytest.mark.parametrize("ranks", [4, 8])
def test_where_ranks_wait_for_each_other_tokens_and_pairs_are_even(ranks: int) -> None:
    # one document of a seventh of the row, whose pairs are more than a rank's share of the cost
    plan = context_plan([142_753, *heavy_tail(900_000, 0).tolist()], ranks)
    assert plan.straddling[0]
    tokens = np.bincount(plan.rank, plan.length, ranks)
    pairs = plan.loads - tokens
    assert tokens.max() + pairs.max() <= 1.05 * (tokens.mean() + pairs.mean())


def test_a_long_document_is_cut_from_both_ends_at_equal_cost() -> None:
    # |0 1 2| 3 4 5 |6 7 8|: rank 0 holds the ends, and rank 1 the middle
    plan = context_plan([12], 2, cost=Cost(0, 1))
    assert plan.positions(0).tolist() == [0, 1, 2, 9, 10, 11]
    assert plan.positions(1).tolist() == [3, 4, 5, 6, 7, 8]
    assert plan.loads.tolist() == [72.0, 72.0]  # 3^2 + (12^2 - 9^2) and 9^2 - 3^2


def test_bad_input_says_what_to_pass() -> None:
    with pytest.raises(PackingError, match=r"3 tokens are fewer than 4 ranks, so a rank would have none"):
        context_plan([1, 2], 4)
    with pytest.raises(PackingError, match=r"ranks must be an integer of at least 1, got 0"):
        context_plan([1, 2], 0)
    with pytest.raises(PackingError, match=r"lengths is empty"):
        context_plan([], 2)
    with pytest.raises(PackingError, match=r"cost is 3: pass Cost"):
        context_plan([1, 2], 2, cost=3)
    with pytest.raises(PackingError, match=r"rank is 2 and the plan is for ranks 0 to 1"):
        context_plan([1, 2], 2).tokens(2)
