"""stream(equal_cost=True): the rows of all shards in one place cost about the same, and go on in the same order."""

from __future__ import annotations

import numpy as np
import pytest

from packing_core import Cost, stream
from packing_core.errors import PackingError
from packing_core.streaming.rounds import by_step

COST = Cost(tokens=1, squares=0.05)
LENGTHS = np.random.default_rng(0).lognormal(2, 1.1, 900).clip(1, 60).astype(int).tolist()
DOCUMENTS = [[d % 90 + 3] * n for d, n in enumerate(LENGTHS)]


def rows_of(shards: int, **options) -> list[list]:
    """The rows of each shard."""
    given = {"seed": 0, "buffer": 200, "cost": COST, "equal_cost": True, **options}
    return [list(stream(DOCUMENTS, 60, shard=(shard, shards), **given)) for shard in range(shards)]


def slowest_over_mean(rows: list[list]) -> float:
    costs = np.array([[COST.of_rows(row)[0] for row in of_shard] for of_shard in rows]).T
    costs = costs[(costs > 0).all(axis=1)]
    return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())


def contents(rows: list) -> list:
    return [(row.input_ids.tolist(), row.sources.tolist()) for row in rows]


@pytest.mark.parametrize("shards", [4, 7])
def test_shards_cost_the_same_in_every_place_and_no_document_is_lost(shards):
    even = rows_of(shards, buffer=600)
    any_order = rows_of(shards, buffer=600, equal_cost=False, cost=None)
    assert len({len(rows) for rows in even}) == 1
    found = sorted(d for rows in even for row in rows for d in row.sources.tolist())
    assert found == list(range(len(DOCUMENTS)))
    assert slowest_over_mean(even) - 1 < 0.3 * (slowest_over_mean(any_order) - 1)
    assert len(even[0]) <= len(any_order[0]) + 1, "no fill is lost"
    assert contents(even[0]) != contents(rows_of(shards, seed=1)[0])
    first = [int(row.lengths.max()) for row in even[0]]
    assert first != sorted(first, reverse=True), "steps are shuffled"


def test_a_step_that_an_earlier_round_began_is_completed_first():
    costs = np.array([5.0, 1.0, 4.0, 3.0, 2.0, 9.0, 8.0])
    # three rows a step, and two rows left before: one completes that step, then 8 5 4 and 3 2 1
    assert by_step(np.arange(7), costs, 3, 2, None).tolist() == [5, 6, 0, 2, 3, 4, 1]
    assert by_step(np.array([1, 3, 4, 6]), costs, 3, 0, None).tolist() == [6, 3, 4, 1], "what is no step is last"


def test_what_does_not_go_together_is_refused():
    with pytest.raises(PackingError, match='chooses the rows of a step by cost: leave it or order="curriculum" out'):
        stream(DOCUMENTS, 60, equal_cost=True, order="curriculum")
    with pytest.raises(PackingError, match="cost has no effect without equal_cost=True: pass both, or leave cost out"):
        stream(DOCUMENTS, 60, cost=COST)
    with pytest.raises(PackingError, match="cost is 3: pass Cost"):
        stream(DOCUMENTS, 60, equal_cost=True, cost=3)
    state = stream(DOCUMENTS, 60, shard=(0, 2), equal_cost=True).state_dict()
    with pytest.raises(PackingError, match="was taken with equal_cost=2 and this stream has equal_cost=3"):
        stream(DOCUMENTS, 60, shard=(0, 3), equal_cost=True).load_state_dict(state)
    with pytest.raises(PackingError, match="was taken with cost="):
        stream(DOCUMENTS, 60, shard=(0, 2), equal_cost=True, cost=COST).load_state_dict(state)
