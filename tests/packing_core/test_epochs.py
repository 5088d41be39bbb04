"""plan_epoch: every epoch holds every document once, in as many rows, and gives every rank as many as the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core import plan
from packing_core.errors import CapacityError, PackingError
from packing_core.planning.epochs import _cut_in_two, plan_epoch

LENGTHS = np.random.default_rng(0).integers(1, 41, 200)


def heavy_tail(count: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(3000) - 1.3**2 / 2, 1.3, count)
    return drawn.clip(1, 65_536).astype(np.int64)


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


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    ("capacity", "lengths", "varies"),
    [
        (2048, np.random.default_rng(0).integers(513, 1025, 6000), True),
        (65_536, heavy_tail(30_000), False),
    ],
    ids=["uniform", "heavy tail"],
)
def test_the_number_of_rows_follows_from_the_lengths_whatever_is_drawn(capacity, lengths, varies, ranks) -> None:
    best = plan(lengths, capacity, strategy="best_fit")
    drawn = [plan(lengths, capacity, seed=seed).n_rows for seed in range(4)]
    counts = {plan_epoch(lengths, capacity, seed=s, epoch=e, ranks=ranks).plan.n_rows for s in (0, 1) for e in range(3)}
    counts.add(plan_epoch(lengths[::-1], capacity, seed=0, ranks=ranks).plan.n_rows)
    (count,) = counts
    assert count % ranks == 0 and max(drawn) <= count
    full = lengths.sum() / capacity / 0.999
    assert count < (full if best.n_rows <= full else 1.005 * best.n_rows) + ranks
    assert len(set(drawn)) > 1 or not varies, "draws differ in their number of rows, and epochs do not"


def test_rows_of_an_epoch_look_like_random_draws() -> None:
    lengths = heavy_tail(20_000)
    epoch = plan_epoch(lengths, 65_536, seed=0, epoch=1).plan.composition()
    random, best = (plan(lengths, 65_536, strategy=s).composition() for s in ("sequential", "best_fit"))
    assert epoch.row_distance < 1.2 * random.row_distance < best.row_distance
    assert epoch.documents_per_row_deviation < 1.2 * random.documents_per_row_deviation


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 60))
def test_the_row_of_the_most_pieces_is_cut_in_two_so_many_times(counts, times) -> None:
    naive = list(counts)
    for _ in range(times):
        longest = naive.index(max(naive))
        if naive[longest] > 1:
            naive[longest : longest + 1] = [naive[longest] // 2, naive[longest] - naive[longest] // 2]
    assert np.diff(_cut_in_two(np.cumsum([0, *counts]), times)).tolist() == naive


def test_a_document_has_other_neighbours_in_every_epoch_and_the_same_in_every_call() -> None:
    def neighbours(epoch: int, seed: int = 0) -> set[frozenset[int]]:
        return {frozenset(row) for row in plan_epoch(LENGTHS, 64, seed=seed, epoch=epoch).plan.to_lists()}

    assert neighbours(1) == neighbours(1)
    assert len(neighbours(0) & neighbours(1)) < 10 and len(neighbours(0) & neighbours(0, seed=1)) < 10


def test_a_long_document_is_named_by_its_place_in_the_data_set() -> None:
    with pytest.raises(CapacityError, match=r'document 3 has 9 tokens and capacity is 8: pass overflow="split"'):
        plan_epoch([2, 3, 4, 9], 8, seed=0)
    with pytest.raises(PackingError, match="the plan has 2 rows and there are 4 ranks"):
        plan_epoch([2, 3], 8, seed=0, ranks=4)
