"""composition: the figures by their definitions, and that mixed rows look like random draws where best fit does not."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core import Cost, PackingError, balance, plan


def heavy_tail(count):
    lengths = np.random.default_rng(0).lognormal(np.log(3000) - 1.3**2 / 2, 1.3, count)
    return lengths.clip(1, 65_536).astype(int)


def distance(part, whole):
    """Kolmogorov-Smirnov distance: both distributions are constant between lengths, so looking at those is enough."""
    return max(abs(np.mean(np.array(part) <= x) - np.mean(np.array(whole) <= x)) for x in whole)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.integers(1, 4))
def test_figures_are_those_of_the_definitions(lengths, rows_per_step):
    made = plan(lengths, 12)
    rows = [[lengths[d] for d in row] for row in made.to_lists()]
    size = min(rows_per_step, len(rows))
    steps = [list(chain(*rows[at : at + size])) for at in range(0, len(rows) - size + 1, size)]
    found = made.composition(rows_per_step)
    counts = [len(row) for row in rows]
    squares = [sum(n * n for n in row) for row in rows]
    assert found.rows_per_step == size
    assert found.documents_per_row == pytest.approx(np.mean(counts))
    assert found.documents_per_row_deviation == pytest.approx(np.std(counts) / np.mean(counts))
    assert found.documents_per_step == pytest.approx(np.mean([len(step) for step in steps]))
    assert found.length_spread == pytest.approx(np.mean([np.std(np.log(row)) for row in rows]), abs=1e-9)
    assert found.data_length_spread == pytest.approx(np.std(np.log(lengths)), abs=1e-9)
    assert found.row_distance == pytest.approx(np.mean([distance(row, lengths) for row in rows]))
    assert found.step_distance == pytest.approx(np.mean([distance(step, lengths) for step in steps]))
    assert found.attention_per_row == pytest.approx(np.mean(squares))
    assert found.attention_per_row_deviation == pytest.approx(np.std(squares) / np.mean(squares))


def test_mixed_rows_look_like_random_draws_and_best_fit_rows_do_not():
    lengths = heavy_tail(30_000)
    random, mixed, best = (plan(lengths, 65_536, strategy=s).composition() for s in ("sequential", "mixed", "best_fit"))
    assert mixed.documents_per_row_deviation < 1.2 * random.documents_per_row_deviation
    assert mixed.row_distance < 1.2 * random.row_distance
    assert mixed.length_spread > 0.95 * random.length_spread
    assert best.documents_per_row_deviation > 3 * random.documents_per_row_deviation
    assert best.row_distance > 3 * random.row_distance


def test_mixed_rows_stay_mixed_where_no_packing_is_full():
    lengths = np.random.default_rng(0).lognormal(np.log(512) - 0.18, 0.6, 20_000).clip(1, 2048).astype(int)
    random, mixed, best = (plan(lengths, 2048, strategy=s) for s in ("sequential", "mixed", "best_fit"))
    assert best.efficiency < 0.999 and mixed.n_rows <= 1.005 * best.n_rows
    assert mixed.composition().row_distance < 1.2 * random.composition().row_distance < best.composition().row_distance


@pytest.mark.parametrize("cost", [Cost(), Cost(tokens=0, squares=1)], ids=["default", "attention alone"])
@pytest.mark.parametrize("rows_per_step", [2, 4])
def test_balanced_steps_of_mixed_rows_are_even_in_cost_and_in_documents(rows_per_step, cost):
    lengths = heavy_tail(300_000)
    sharded = balance(plan(lengths, 65_536, strategy="mixed"), 64, cost=cost, rows_per_step=rows_per_step)
    assert sharded.imbalance < 1.01
    of_a_row = plan(lengths, 65_536, strategy="sequential").composition().documents_per_row_deviation
    random = of_a_row / np.sqrt(64 * rows_per_step)
    assert sharded.composition().documents_per_step_deviation < 1.15 * random


def test_steps_are_chosen_by_cost_no_more_narrowly_than_one_percent_allows():
    lengths = np.random.default_rng(0).lognormal(np.log(270) - 0.4, 0.9, 300_000).clip(1, 2048).astype(int)
    rows = plan(lengths, 2048, strategy="mixed")
    cost = Cost(squares=1.75e-5)
    shuffled, sorted_ = (balance(rows, 64, cost=cost, rows_per_step=2, seed=seed) for seed in (0, None))
    assert sorted_.imbalance < shuffled.imbalance < 1.01
    spread, widest = (dealt.composition().documents_per_step_deviation for dealt in (shuffled, sorted_))
    assert spread < 0.5 * widest


def test_where_one_percent_is_out_of_reach_steps_are_as_even_as_can_be():
    rows = plan([64, 49, 36, 25, 16, 9, 4, 2], 64, max_segments=1, seed=None)
    shuffled, sorted_ = (balance(rows, 2, seed=seed).imbalance for seed in (0, None))
    assert shuffled == pytest.approx(sorted_, rel=1e-12) and sorted_ > 1.01


def test_the_step_that_is_not_whole_is_left_out_of_a_balanced_composition():
    rows = plan([6, 5, 4, 3, 2], 6, max_segments=1, seed=None)
    assert balance(rows, 2, seed=None).composition().documents_per_step == 2.0


def test_where_no_step_is_whole_the_rows_that_there_are_make_one():
    rows = plan([6, 5, 4], 6, max_segments=1, seed=None)
    found = balance(rows, 2, rows_per_step=2, seed=None).composition()
    assert (found.rows_per_step, found.documents_per_step) == (3, 3.0)


def test_a_composition_reads_as_text():
    text = str(plan([5, 3, 4, 4], 8, seed=None).composition(2))
    assert text.startswith("documents per row 2.0 (deviation 0.00), per step of 2 rows 4.0 (0.00)\n")
    assert "attention cost per row, squared tokens 33 (deviation 0.03)" in text


def test_steps_have_a_row_at_least():
    with pytest.raises(PackingError, match="rows_per_step must be an integer of at least 1, got 0"):
        plan([3], 8).composition(0)
