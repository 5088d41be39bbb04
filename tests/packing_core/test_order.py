"""Orders of documents: nothing is lost or doubled, rows follow the order up to a stage, and a resume goes on in it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core import PackingError, RowRule, mix, pack, plan, stream
from packing_core.planning.epochs import plan_epoch
from packing_core.planning.order import STAGE_ROWS
from tests.packing_core.test_stream import documents

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.lognormal(4.5, 0.9, 6000).astype(np.int64).clip(1, 1000)
CAPACITY = 1024
KEYS = RANDOM.integers(0, 40, len(LENGTHS))
WEIGHTED = {"order": "weighted", "weights": {0: 6, 1: 3, 2: 1}}


def options(order: str, count: int) -> dict:
    if order in ("random", "curriculum"):
        return {"order": order}
    if order == "weighted":
        return {**WEIGHTED, "keys": np.arange(count) % 3}
    return {"order": order, "keys": [f"key {i % 5}" for i in range(count)]}


def rows_of(made) -> np.ndarray:
    """The row of every piece."""
    return np.repeat(np.arange(made.n_rows), np.diff(made.row_offsets))


def tokens_of(made) -> list[tuple[int, int]]:
    pieces = zip(made.source.tolist(), made.start.tolist(), made.length.tolist(), strict=True)
    return sorted((source, start + i) for source, start, length in pieces for i in range(length))


ORDERS = ["curriculum", "sorted", "grouped", "weighted"]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=3, max_size=60),
    order=st.sampled_from(ORDERS),
    seed=st.none() | st.integers(0, 3),
    max_segments=st.sampled_from([None, 1, 3]),
)
def test_every_token_is_in_one_row_under_every_order(lengths, order, seed, max_segments) -> None:
    given_options = {"overflow": "split", "seed": seed, "max_segments": max_segments}
    made = plan(lengths, 20, **given_options, **options(order, len(lengths)))
    assert tokens_of(made) == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    assert made.row_tokens.max() <= 20
    assert max_segments is None or np.diff(made.row_offsets).max() <= max_segments
    assert made == plan(lengths, 20, **given_options, **options(order, len(lengths)))


def late_tokens(made) -> int:
    """Tokens of pieces that come after a row with a piece of a longer octave."""
    octave = np.ceil(np.log2(made.length))
    longest = np.maximum.reduceat(octave, made.row_offsets[:-1])
    before = np.maximum.accumulate(np.append(0, longest))[:-1]
    return int(made.length[octave < before[rows_of(made)]].sum())


def test_the_curriculum_trains_short_pieces_first() -> None:
    made = plan(LENGTHS, CAPACITY, order="curriculum", seed=0)
    octaves = len(np.unique(np.ceil(np.log2(LENGTHS))))
    assert late_tokens(made) < octaves * CAPACITY, "the emptiest row of a stage moves on, no more"
    assert late_tokens(plan(LENGTHS, CAPACITY, seed=0)) > 100 * CAPACITY
    documents = np.diff(made.row_offsets)
    assert documents[:20].mean() > 10 * documents[-20:].mean(), "the same tokens of ever fewer documents"


def test_sorted_rows_follow_the_keys_up_to_a_stage() -> None:
    dates = RANDOM.permutation(len(LENGTHS))
    made = plan(LENGTHS, CAPACITY, order="sorted", keys=dates, seed=0)
    wanted = np.cumsum(LENGTHS[np.argsort(dates)])[dates] / CAPACITY  # the row where the document would be in order
    found = np.empty(len(LENGTHS))
    found[made.source] = rows_of(made)
    assert np.abs(found - wanted).max() < 2 * STAGE_ROWS
    assert made.efficiency > 0.98


def test_grouped_documents_lie_together_and_groups_are_drawn() -> None:
    orders = []
    for seed in (0, 1):
        made = plan(LENGTHS, CAPACITY, order="grouped", keys=KEYS, seed=seed)
        row = rows_of(made)
        for key in range(40):
            own = row[KEYS[made.source] == key]
            assert np.ptp(own) < 3 * STAGE_ROWS < made.n_rows / 4
        middle = [np.median(row[KEYS[made.source] == key]) for key in range(40)]
        orders.append(np.argsort(middle).tolist())
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(40))


def test_grouped_documents_of_one_key_follow_each_other_without_a_seed() -> None:
    made = plan([4] * 8, 8, order="grouped", keys=list("bababbaa"), seed=None)
    assert made.to_lists() == [[1, 3], [6, 7], [0, 2], [4, 5]]


def test_weighted_rows_hold_tokens_by_weight_until_a_source_ends() -> None:
    source = np.arange(len(LENGTHS)) % 3
    made = plan(LENGTHS, CAPACITY, keys=source, **WEIGHTED, seed=0)
    row = rows_of(made)
    total = LENGTHS[source == 0].sum() / 0.6  # tokens when the first source ends
    for tenth in range(1, 10):
        until = made.length * (row < tenth / 10 * total / CAPACITY)
        shares = [until[source[made.source] == s].sum() / until.sum() for s in range(3)]
        assert np.abs(np.array(shares) - [0.6, 0.3, 0.1]).max() < 0.05, (tenth, shares)


def test_steps_of_ranks_keep_the_order_and_have_close_costs() -> None:
    dealt = plan_epoch(LENGTHS, CAPACITY, seed=0, order="curriculum", ranks=8)
    step = np.empty(dealt.plan.n_rows)
    step[dealt.steps[:, :, 0]] = np.arange(len(dealt))[:, None]
    assert np.abs(step - np.arange(dealt.plan.n_rows) / 8).max() <= 17
    in_order = np.arange(dealt.plan.n_rows).reshape(-1, 8)
    costs = dealt.cost.of_rows(dealt.plan)
    assert dealt.imbalance < costs[in_order].max(axis=1).sum() / costs[in_order].mean(axis=1).sum()


STREAMED = RANDOM.integers(1, 17, 80)


def test_a_stream_follows_the_order_up_to_a_buffer_and_names_documents_by_their_number() -> None:
    keys = np.arange(80)[::-1]
    rows = list(stream(documents(STREAMED), 20, buffer=8, order="sorted", keys=keys))
    sources = np.concatenate([row.sources for row in rows])
    for row in rows:
        for at, source in zip(row.flat_starts.tolist(), row.sources.tolist(), strict=True):
            assert row.input_ids.reshape(-1)[at] == 1000 * source
    assert np.abs(np.argsort(sources)[::-1] - np.arange(80)).max() <= 3 * 8
    assert sources[0] > 70


def test_an_error_of_an_ordered_stream_names_the_document_of_the_source() -> None:
    lengths = [3, 4, 25, 2]
    with pytest.raises(PackingError, match="document 2 has 25 tokens and capacity is 20"):
        list(stream(documents(lengths), 20, order="sorted", keys=[3, 2, 1, 0]))
    with pytest.raises(PackingError, match="document 1 is empty"):
        list(stream(documents([3, 0, 2]), 20, order="sorted", keys=[3, 2, 1]))


EXACT = {
    "integers beside floats": [2**53 + 1, 2**53, 0.5],
    "integers beyond 64 bits": [2**70 + 1, 2**70, -1],
    "texts that end in NUL": ["b\0", "b", "a"],
}


@pytest.mark.parametrize("name", EXACT)
def test_keys_are_compared_exactly(name) -> None:
    made = plan([1, 1, 1], 1, order="sorted", keys=EXACT[name], seed=0)
    assert made.source.tolist() == [2, 1, 0]


def test_a_state_of_other_keys_is_refused_and_changes_nothing() -> None:
    one, other = (stream(documents(STREAMED), 20, buffer=8, order="sorted", keys=np.arange(80) % n) for n in (7, 5))
    next(one)
    with pytest.raises(PackingError, match="the state was taken with keys="):
        other.load_state_dict(one.state_dict())
    expected = stream(documents(STREAMED), 20, buffer=8, order="sorted", keys=np.arange(80) % 5)
    assert [r.input_ids.tolist() for r in other] == [r.input_ids.tolist() for r in expected]


BAD = [
    ({"order": "shortest"}, "order must be one of 'random', 'curriculum', 'sorted', 'grouped', 'weighted'"),
    ({"order": "sorted"}, 'order="sorted" needs keys: pass one key per document'),
    ({"order": "curriculum", "keys": [1, 2, 3]}, 'keys has no effect under order="curriculum"'),
    ({"keys": [1, 2, 3]}, 'keys has no effect under order="random"'),
    ({"weights": {1: 1}}, 'weights has no effect under order="random"'),
    ({"order": "grouped", "keys": ["a"]}, "there are 1 keys and 3 documents: pass one per document"),
    ({"order": "grouped", "keys": ["a", None, "b"]}, "the key of document 1 is None: pass numbers for all"),
    ({"order": "sorted", "keys": ["a", "b", 3]}, "the key of document 2 is 3 and that of document 0 is 'a'"),
    ({"order": "grouped", "keys": pa.array(["a", None, "b"])}, "the key of document 1 is None: pass numbers"),
    ({"order": "weighted", "keys": list("aab"), "weights": {"a": 1, "b": 10**400}}, "0: pass a number above 0"),
    ({"order": "sorted", "keys": np.array([1.0, np.nan, 2.0])}, "the key of document 1 is nan"),
    ({"order": "sorted", "keys": [[1], [2, 3], [4]]}, "keys is a list of other things"),
    ({"order": "weighted", "keys": list("aab")}, 'order="weighted" needs weights'),
    (
        {"order": "weighted", "keys": list("aab"), "weights": {"a": 1}},
        "the key of document 2 is 'b', and weights has 'a': add its weight",
    ),
    (
        {"order": "weighted", "keys": list("aab"), "weights": {"a": 1, "b": 1, "c": 1}},
        "weights names 'c', the key of no document: leave it out",
    ),
    (
        {"order": "weighted", "keys": list("aab"), "weights": {"a": 1, "b": 0}},
        "the weight of 'b' is 0: pass a number above 0",
    ),
]


def test_keys_may_be_a_column_of_arrow() -> None:
    column = pa.chunked_array([["b", "a"], ["b"]])
    assert plan([1, 2, 3], 8, order="sorted", keys=column, seed=None).to_lists() == [[1, 0, 2]]


@pytest.mark.parametrize(("given_options", "text"), BAD)
def test_bad_orders_say_what_where_and_the_way_out(given_options, text) -> None:
    for call in (
        lambda: plan([1, 2, 3], 8, **given_options),
        lambda: plan_epoch([1, 2, 3], 8, seed=0, **given_options),
        lambda: stream(documents([1, 2, 3]), 8, **given_options),
    ):
        with pytest.raises(PackingError) as caught:
            call()
        assert text in str(caught.value)


def test_one_rule_stands_in_place_of_the_keywords_of_every_door() -> None:
    keys = {"order": "grouped", "keys": list("abcab"), "overflow": "overlap", "context": 2, "max_segments": 2}
    lengths, rule = [5, 20, 3, 8, 6], RowRule(9, **keys)
    assert plan(lengths, rule) == plan(lengths, 9, **keys)
    assert plan_epoch(lengths, rule, seed=0, ranks=2).plan == plan_epoch(lengths, 9, seed=0, ranks=2, **keys).plan
    given = documents(lengths)
    assert pack(given, rule).input_ids.tolist() == pack(given, 9, **keys).input_ids.tolist()
    rows, same = ([row.input_ids.tolist() for row in stream(given, *a, **k)] for a, k in (((rule,), {}), ((9,), keys)))
    assert rows == same
    for door in (plan, lambda *a, **k: plan_epoch(*a, seed=0, **k)):
        with pytest.raises(PackingError, match="max_segments is an option of the RowRule: build the rule with it"):
            door(lengths, rule, max_segments=3)
    with pytest.raises(PackingError, match="epochs pack mixed rows: leave strategy='best_fit' out"):
        plan_epoch(lengths, RowRule(20, strategy="best_fit"), seed=0)
    with pytest.raises(PackingError, match="a plan has no steps, so equal_cost=True has no effect"):
        pack(given, RowRule(20, equal_cost=True))


def test_an_order_takes_no_other_strategy_and_no_source_that_is_read_once() -> None:
    with pytest.raises(PackingError, match="packs mixed rows in stages of its own: leave strategy='best_fit' out"):
        plan([1, 2, 3], 8, order="curriculum", strategy="best_fit")
    with pytest.raises(PackingError, match="source is a function and order="):
        stream(lambda start: iter([]), 8, order="curriculum")
    with pytest.raises(PackingError, match="leave strategy='best_fit' out"):
        stream([[1]], 8, order="curriculum", strategy="best_fit")
    with pytest.raises(PackingError, match="in_order=True keeps the order of the documents"):
        plan_epoch([1, 2, 3], 8, seed=0, in_order=True, order="curriculum")


# Weights of a mixture that change on the way.

ENDLESS = [lambda start, name=name: iter(lambda: name, 0) for name in "ab"]


def test_weights_change_linearly_between_the_documents_that_name_them() -> None:
    mixture = mix(ENDLESS, [(0, [9, 1]), (102_400, [1, 9]), (204_800, [1, 1])], seed=0)
    documents_of = []
    for start in (0, 51_200, 102_400, 204_800, 409_600):
        given_documents = [d for d, _ in zip(mixture(start), range(10_240), strict=False)]
        documents_of.append(given_documents.count("a") / 10_240)
    # the mean share of a over the next tenth: 0.9 - 0.8 x (start + half a tenth), and 0.1 + 0.4 x half a tenth
    assert documents_of == pytest.approx([0.86, 0.46, 0.12, 0.5, 0.5], abs=1e-3)


@settings(max_examples=12)
@given(start=st.integers(0, 5000), stop=st.sampled_from(["first", "all", "once"]))
def test_changing_weights_go_on_from_any_document(start, stop) -> None:
    sources = [[f"{name}{i}" for i in range(n)] for name, n in (("a", 2500), ("b", 1500))]
    weights = [(0, [5, 1]), (1000, [1, 5]), (3000, [1, 1])]
    whole = list(mix(sources, weights, seed=1, stop=stop))
    start = min(start, len(whole))
    assert list(mix(sources, weights, seed=1, stop=stop)(start)) == whole[start:]
    if stop == "once":
        assert len(whole) == len(set(whole)) == 4000


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([(0, [1, 1]), 3], "pass one number per source, or pairs (document, weights)"),
        ([(5, [1, 1])], "weights has pairs for the documents [5]: begin at 0, with ascending integers"),
        ([(0, [1, 1]), (0, [1, 2])], "weights has pairs for the documents [0, 0]: begin at 0"),
        ([(0, [1, 1]), (9, [1, 0])], "pass numbers above 0"),
    ],
)
def test_bad_weights_over_documents_say_the_way_out(weights, text) -> None:
    with pytest.raises(PackingError) as caught:
        mix(ENDLESS, weights)
    assert text in str(caught.value)
