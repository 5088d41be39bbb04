"""plan: textbook packings, nothing lost or doubled, the overflow policies, order, and what is refused."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance import naive
from packing_core import CapacityError, PackingError, plan
from tests.packing_core.naive import mixed

TEXTBOOK = {**naive.STRATEGIES, "mixed": mixed}


@st.composite
def problems(draw, longest=None):
    """Lengths, a capacity, and the options that limit a row; ``longest`` in capacities, 1 by default."""
    capacity = draw(st.integers(1, 96))
    lengths = draw(st.lists(st.integers(1, (longest or 1) * capacity), min_size=1, max_size=40))
    return lengths, capacity, {"max_segments": draw(st.sampled_from([None, 1, 2, 3, 7]))}


def sizes(rows, lengths):
    """Lists the lengths of each row's documents: documents of equal size are interchangeable."""
    return [[lengths[d] for d in row] for row in rows]


@given(problems(), st.sampled_from(sorted(TEXTBOOK)))
@example(([3, 3, 3, 2, 2, 2, 2], 7, {"max_segments": 2}), "best_fit")
def test_every_strategy_is_the_textbook_one_row_for_row(problem, strategy):
    lengths, capacity, options = problem
    made = plan(lengths, capacity, strategy=strategy, seed=None, **options)
    expected = TEXTBOOK[strategy](lengths, capacity, **options)
    assert sizes(made.to_lists(), lengths) == sizes(expected, lengths)


@pytest.mark.parametrize("strategy", sorted(TEXTBOOK))
@pytest.mark.parametrize(
    ("capacity", "lengths"),
    [
        (2048, np.random.default_rng(0).lognormal(5.2, 0.9, 1500).clip(1, 2048).astype(int)),
        (65536, np.random.default_rng(1).lognormal(7.1, 1.3, 1500).clip(1, 65536).astype(int)),
        (2**21, np.random.default_rng(4).integers(2**17, 2**21, 600)),  # a size and an index, no more than 2**32
        (2**40, np.random.default_rng(2).integers(2**38, 2**39, 600)),  # more than an int32 holds
        (64, np.random.default_rng(3).integers(1, 9, 3000)),  # many documents of each length
    ],
    ids=["short", "heavy tail", "over 2**31", "long", "few lengths"],
)
def test_corpora_are_packed_as_by_the_textbook(strategy, capacity, lengths):
    made = plan(lengths, capacity, strategy=strategy, seed=None)
    expected = TEXTBOOK[strategy](lengths.tolist(), capacity)
    assert sizes(made.to_lists(), lengths) == sizes(expected, lengths)


@given(
    problems(longest=3),
    st.sampled_from(sorted(TEXTBOOK)),
    st.sampled_from(["truncate", "split", "drop"]),
    st.sampled_from([None, 0, 5]),
)
def test_every_token_stands_in_one_row_or_is_accounted_for(problem, strategy, overflow, seed):
    lengths, capacity, options = problem
    if overflow == "drop":
        lengths = [1, *lengths]  # something is left
    made = plan(lengths, capacity, strategy=strategy, overflow=overflow, seed=seed, **options)
    made = replace(made, check=True)  # checks the invariants that the planner vouches for
    kept = [set() for _ in lengths]
    for document, start, length in zip(made.source, made.start, made.length, strict=True):
        kept[document] |= set(range(start, start + length))
    too_long = [d for d, length in enumerate(lengths) if length > capacity]
    for document, length in enumerate(lengths):
        expected = length
        if document in too_long and overflow != "split":
            expected = capacity if overflow == "truncate" else 0
        assert kept[document] == set(range(expected))
    assert made.dropped.tolist() == (too_long if overflow == "drop" else [])
    assert made.truncated.tolist() == (too_long if overflow == "truncate" else [])
    if options["max_segments"]:
        assert np.diff(made.row_offsets).max() <= options["max_segments"]


@given(problems(), st.sampled_from(sorted(set(TEXTBOOK) - {"mixed"})), st.integers(0, 2**63))
def test_a_seed_moves_whole_rows_and_nothing_else(problem, strategy, seed):
    lengths, capacity, options = problem
    shuffled = plan(lengths, capacity, strategy=strategy, seed=seed, **options).to_lists()
    planned = plan(lengths, capacity, strategy=strategy, seed=None, **options).to_lists()
    assert sorted(shuffled) == sorted(planned)
    assert shuffled == plan(lengths, capacity, strategy=strategy, seed=seed, **options).to_lists()


@given(problems(), st.integers(0, 9))
def test_mixed_rows_are_full_or_close_to_the_number_of_best_fits(problem, seed):
    lengths, capacity, options = problem
    made = plan(lengths, capacity, strategy="mixed", seed=seed, **options)
    assert made == plan(lengths, capacity, strategy="mixed", seed=seed, **options)
    most = options["max_segments"] or len(lengths)
    bound = max(sum(lengths) / capacity, len(lengths) / most)
    best = len(naive.best_fit_decreasing(lengths, capacity, **options))
    assert made.n_rows <= (bound / 0.999 if best <= bound / 0.999 else 1.005 * best)


def test_rows_are_mixed_unless_another_strategy_is_passed():
    lengths = np.random.default_rng(0).integers(513, 1025, 1000)
    assert plan(lengths, 2048) == plan(lengths, 2048, strategy="mixed") != plan(lengths, 2048, strategy="best_fit")


def test_the_seed_draws_the_documents_of_mixed_rows():
    lengths = np.random.default_rng(0).lognormal(5.2, 0.9, 3000).clip(1, 2048).astype(int)
    one, other = ({frozenset(row) for row in plan(lengths, 2048, strategy="mixed", seed=s).to_lists()} for s in (0, 1))
    assert len(one & other) < 0.05 * len(one)
    in_order = plan(lengths, 2048, strategy="mixed", seed=None)
    assert np.mean(np.diff(in_order.source) == 1) > 0.5


@pytest.mark.parametrize(("sigma", "capacity", "mean"), [(0.9, 2048, 270), (1.3, 65_536, 3000)])
def test_mixed_rows_are_full_from_ten_thousand_documents_on(sigma, capacity, mean):
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 10_000)
    lengths = drawn.clip(1, capacity).astype(int)
    assert min(plan(lengths, capacity, strategy="mixed", seed=seed).efficiency for seed in range(5)) >= 0.999


def test_the_shuffle_is_fixed_by_the_bit_stream_that_numpy_guarantees():
    rows = 1000
    keys = np.random.PCG64(7).random_raw(rows).tolist()
    low = 1024 - 1  # the low bits make room for the index
    expected = sorted(range(rows), key=lambda row: keys[row] & ~low | row)
    planned = plan([1] * rows, 1, strategy="best_fit", seed=None).source
    assert plan([1] * rows, 1, strategy="best_fit", seed=7).source.tolist() == planned[expected].tolist()


def test_rows_come_out_in_an_order_that_says_nothing_about_their_lengths():
    lengths = np.random.default_rng(0).lognormal(7, 1.3, 20_000).clip(1, 65536).astype(int)

    def order_by_length(**options):
        made = plan(lengths, 65536, **options)
        longest = np.maximum.reduceat(lengths[made.source], made.row_offsets[:-1])
        return np.corrcoef(longest, np.arange(len(longest)))[0, 1]

    assert abs(order_by_length()) < 0.1 and abs(order_by_length(strategy="best_fit")) < 0.1
    assert order_by_length(strategy="best_fit", seed=None) < -0.5


@given(problems())
def test_the_lower_bound_is_one(problem):
    lengths, capacity, options = problem
    lengths = lengths[:7]
    made = plan(lengths, capacity, **options)
    assert made.lower_bound <= fewest_rows(lengths, capacity) <= made.n_rows


def fewest_rows(lengths, capacity):
    """The optimum by trying every placement."""
    sizes = sorted(lengths, reverse=True)

    def place(index, rows):
        if index == len(sizes):
            return len(rows)
        best = place(index + 1, [*rows, sizes[index]])
        for row in {used: at for at, used in enumerate(rows)}.values():
            if rows[row] + sizes[index] <= capacity:
                best = min(best, place(index + 1, [*rows[:row], rows[row] + sizes[index], *rows[row + 1 :]]))
        return best

    return place(0, [])


@pytest.mark.parametrize("strategy", ["mixed", "best_fit"])
def test_a_plan_needs_memory_for_a_few_arrays_only(strategy):
    lengths = np.random.default_rng(0).lognormal(5.2, 0.9, 300_000).clip(1, 2048).astype(int)
    tracemalloc.start()
    made = plan(lengths, 2048, strategy=strategy)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.n_pieces == 300_000
    assert peak < 8 * lengths.nbytes


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_any_integer_dtype_will_do(dtype):
    lengths = np.array([100, 3, 27, 99], dtype)
    assert plan(lengths, 128, strategy="best_fit", seed=None).to_lists() == [[0, 2], [3, 1]]
    assert plan(lengths, 128, strategy="mixed", seed=None).to_lists() == [[0, 1], [2, 3]]


REFUSED = [
    (([], 8), {}, "lengths is empty: there is no document to pack"),
    (([3, 0], 8), {}, "document 1 is empty: lengths must be at least 1, leave empty documents out"),
    (([3, -2], 8), {}, "document 1 has length -2: lengths must be at least 1"),
    (([3.0], 8), {}, "lengths must be integers, got float64: convert with numpy.asarray(lengths, dtype=int)"),
    (([True], 8), {}, "lengths must be integers, got bool"),
    (([[1, 2], [3, 4]], 8), {}, "lengths must be one-dimensional, one integer per document; got shape [2, 2]"),
    (([[1, 2], [3]], 8), {}, "pass one integer per document, [len(d) for d in documents]"),
    (([2**61], 2**60), {}, "pass 2**60 tokens"),
    (([2**59] * 3, 2**60), {}, "over 3 documents pass 2**60 tokens"),
    (([3], 0), {}, "capacity must be an integer of at least 1, got 0"),
    (([3], 8.0), {}, "capacity must be an integer of at least 1, got 8.0"),
    (([1], True), {}, "capacity must be an integer of at least 1, got True"),
    (
        ([3], 8),
        {"strategy": "bfd"},
        "strategy must be one of 'best_fit', 'mixed', 'first_fit', 'sequential'; got 'bfd'",
    ),
    (
        ([3], 8),
        {"overflow": "cut"},
        "overflow must be one of 'error', 'truncate', 'split', 'overlap', 'restart', 'drop'; got 'cut'",
    ),
    (([3], 8), {"max_segments": 0}, "max_segments must be an integer of at least 1, got 0"),
    (([3], 8), {"seed": -1}, "seed must be an integer of at least 0, or None for no shuffling; got -1"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED)
def test_bad_input_is_refused_with_the_way_out(arguments, options, message):
    with pytest.raises(PackingError) as raised:
        plan(*arguments, **options)
    assert message in str(raised.value)


def test_a_document_over_capacity_is_named_with_the_ways_out():
    lengths = [5] * 17 + [9214, 10_000]
    with pytest.raises(CapacityError) as raised:
        plan(lengths, 8192)
    assert str(raised.value) == (
        "document 17 has 9,214 tokens and capacity is 8,192 (1 more are too long): "
        'pass overflow="split", "truncate" or "drop", or raise capacity'
    )


def test_dropping_everything_is_refused():
    with pytest.raises(CapacityError, match="nothing is left to pack: all 2 documents have more than 8 tokens"):
        plan([9, 10], 8, overflow="drop")


def test_sizes_that_pass_an_int32_with_their_index_are_sorted_all_the_same() -> None:
    lengths = [5, 2**30 - 1, 2**29 + 3]
    made = plan(lengths, 2**30, strategy="best_fit", seed=None)
    assert made.n_rows == 2
    assert {source: made.length[made.source.tolist().index(source)] for source in range(3)} == dict(enumerate(lengths))
