"""Runs: one number per token from a few numbers per run, as a loop over the tokens would write it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core.storage import segment_indexing as runs


@st.composite
def layouts(draw):
    """(first index, length, size) of ordered runs with gaps between them, some of length 0."""
    lengths = np.array(draw(st.lists(st.integers(0, 9), max_size=8)), np.int64)
    free = np.array(draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))), np.int64)
    at = np.cumsum(free + lengths) - lengths
    return at, lengths, int((free + lengths).sum()) + draw(st.integers(0, 3))


@settings(max_examples=150)
@given(layouts())
def test_every_token_gets_its_number(layout):
    at, lengths, size = layout
    owner, place = [-1] * size, [0] * size
    for run, (first, count) in enumerate(zip(at, lengths)):
        for k in range(count):
            owner[first + k], place[first + k] = run, k
    np.testing.assert_array_equal(runs.spread(np.arange(len(at)), at, lengths, size, -1), owner)
    np.testing.assert_array_equal(runs.ramps(at, lengths, size), place)
    np.testing.assert_array_equal(runs.indexes(at, lengths), [t for t in range(size) if owner[t] >= 0])
    np.testing.assert_array_equal(runs.indexes(*runs.gaps(at, lengths, size)), [t for t in range(size) if owner[t] < 0])
    np.testing.assert_array_equal(runs.ranges(lengths), [k for count in lengths for k in range(count)])


@settings(max_examples=100)
@given(layouts())
def test_each_gap_may_have_a_number_of_its_own(layout):
    at, lengths, size = layout
    fill = np.arange(len(at) + 1) + 100
    numbers = runs.spread(np.zeros(len(at), int), at, lengths, size, fill)
    begin, free = runs.gaps(at, lengths, size)
    for gap, (first, count) in enumerate(zip(begin, free)):
        assert (numbers[first : first + count] == 100 + gap).all()
    assert (numbers >= 100).sum() == free.sum()


@pytest.mark.parametrize("count", [0, 3])
def test_a_step_past_every_integer_chooses_the_first(count):
    numbers = runs.chosen(slice(None, None, 2**63), count)
    assert numbers.dtype == np.int64 and numbers.tolist() == [0][:count]


@given(st.integers(0, 8), st.data())
def test_chosen_is_what_numpy_would_index(count, data):
    few, inside = 5 if count else 0, st.integers(-count, max(0, count - 1))
    index = data.draw(
        st.one_of(
            st.slices(count),
            st.lists(inside, max_size=few),
            st.lists(inside, max_size=few).map(lambda rows: np.array(rows, np.int8)),
            st.lists(st.booleans(), min_size=count, max_size=count).map(lambda rows: np.array(rows, bool)),
        )
    )
    as_array = np.array(index, np.int64) if isinstance(index, list) else index
    numbers = runs.chosen(index, count)
    np.testing.assert_array_equal(numbers, np.arange(count)[as_array])
    assert numbers.dtype == np.int64


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (5, "row 5 of 5: rows are numbered 0 to 4"),
        ([0, -6], "row -6 of 5"),
        (np.array([7], np.uint8), "row 7 of 5"),
        ([0.5], "chosen by integers, a slice, or 5 bools; got float64"),
        ([True], r"got bool \(1,\)"),
        ([[1]], r"got int64 \(1, 1\)"),
        ("a", "got <U1"),
    ],
)
def test_what_cannot_be_chosen_is_named(index, message):
    with pytest.raises(IndexError, match=message):
        runs.chosen(index, 5)
