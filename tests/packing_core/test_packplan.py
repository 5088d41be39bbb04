"""PackPlan: what it derives, how it is taken apart and stored, and which contradictions it refuses."""

import pickle
from contextlib import nullcontext

import numpy as np
import pytest

from packing_core import CapacityError, LayoutError, PackingError, PackPlan, plan


def two_rows(**changes):
    # capacity 8: [0 0 0 0 0 2 2 2] [1 1 1 1 . . . .]
    given = {"row_offsets": [0, 2, 3], "source": [0, 2, 1], "start": [0, 0, 0], "length": [5, 3, 4]}
    return PackPlan(**(given | {"capacity": 8, "n_documents": 3} | changes))


def test_what_a_plan_derives():
    made = two_rows()
    assert (made.n_rows, made.n_pieces, made.n_tokens) == (2, 3, 12)
    assert made.efficiency == 12 / 16
    assert made.row_tokens.tolist() == [8, 4]
    assert made.offset.tolist() == [0, 5, 0]
    assert made.lower_bound == 2
    assert made.to_lists() == [[0, 2], [1]]
    assert repr(made) == "PackPlan(2 rows of 8, 3 pieces, 12 tokens, efficiency 0.7500)"


@pytest.mark.parametrize("name", ["row_offsets", "source", "start", "length", "dropped", "row_tokens", "offset"])
def test_arrays_are_int64_and_read_only(name):
    for made in (two_rows(), pickle.loads(pickle.dumps(two_rows()))):
        array = getattr(made, name)
        assert array.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 7


def test_the_caller_keeps_a_writeable_array():
    source = np.array([0, 2, 1])
    two_rows(source=source)
    source[0] = 0


def test_rows_are_selected_in_the_given_order():
    made = plan(np.arange(1, 60), 64)
    lists = made.to_lists()
    assert made.select([4, 0, 2]).to_lists() == [lists[4], lists[0], lists[2]]
    assert made.select(slice(1, None, 3)).to_lists() == lists[1::3]
    assert made.select(np.arange(made.n_rows)) == made
    assert made.select([3]).n_documents == 59


def test_plans_are_equal_when_all_they_say_is():
    assert two_rows() == two_rows()
    for changes in (
        {"capacity": 9},
        {"source": [0, 1, 2]},
        {"n_documents": 4},
        {"start": [0, 1, 0]},
        {"truncated": [1]},
    ):
        assert two_rows() != two_rows(**changes)
    assert two_rows() != "a plan"


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", lengths=[1, 2])
    with pytest.raises(LayoutError, match=r"other.npz' is not a saved plan, it has no 'row_offsets': pass one of"):
        PackPlan.load(tmp_path / "other.npz")
    np.save(tmp_path / "array.npy", [1, 2])
    with pytest.raises(LayoutError, match=r"array.npy' is not a saved plan: pass an .npz archive of PackPlan.save"):
        PackPlan.load(tmp_path / "array.npy")


@pytest.mark.parametrize(("alignment", "loads"), [(1, True), (4, False)])
def test_a_stored_plan_with_gaps_is_refused(tmp_path, alignment, loads):
    two_rows().save(tmp_path / "plan.npz")
    np.savez(tmp_path / "plan.npz", **np.load(tmp_path / "plan.npz"), alignment=alignment)  # as earlier versions did
    with nullcontext() if loads else pytest.raises(PackingError, match="has gaps by alignment=4: plan it again"):
        assert PackPlan.load(tmp_path / "plan.npz") == two_rows()


def test_a_stored_plan_is_checked_again(tmp_path):
    made = two_rows()
    made.save(tmp_path / "plan.npz")
    stored = dict(np.load(tmp_path / "plan.npz"))
    np.savez(tmp_path / "plan.npz", **(stored | {"length": [5, 4, 4]}))
    with pytest.raises(CapacityError, match="row 0 takes 9 tokens"):
        PackPlan.load(tmp_path / "plan.npz")


def test_a_list_of_ids_cannot_say_which_piece():
    made = plan([3, 21], 8, overflow="split")
    with pytest.raises(LayoutError, match="document 1 is split over several pieces, which a list of ids cannot say"):
        made.to_lists()


CONTRADICTIONS = [
    ({"length": [5, 3]}, "source, start and length have 3, 3 and 2 entries"),
    ({"row_offsets": [0, 2]}, "row_offsets must run from 0 to the number of pieces, 3"),
    ({"row_offsets": [1, 2, 3]}, "got 3 entries from 1 to 3"),
    ({"row_offsets": [0], "source": [], "start": [], "length": []}, "over at least one row"),
    ({"row_offsets": [0, 2, 2, 3]}, "row 1 has no piece"),
    ({"length": [1, 0, 4]}, "piece 1 has length 0: leave empty pieces out"),
    ({"length": [5, 4, 4]}, "row 0 takes 9 tokens and capacity is 8"),
    ({"source": [0, 3, 1]}, "piece 1 is of document 3, and the plan has 3 documents: name 0 to 2"),
    ({"start": [0, -1, 0]}, "piece 1 starts at token -1: starts count from 0"),
    ({"source": [0, 0, 1], "start": [0, 4, 0]}, "token 4 of document 0 stands in two pieces, 0 and 1"),
    ({"dropped": [2]}, "document 2 is listed as dropped and stands in a row"),
    ({"dropped": [3]}, "dropped names a document outside 0..2"),
    ({"truncated": [-1]}, "truncated names a document outside 0..2"),
    ({"length": [5.0, 3.0, 4.0]}, "length is float64 [3]: pass integers in one dimension"),
    ({"n_documents": 0}, "n_documents must be an integer of at least 1, got 0"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(PackingError) as raised:
        two_rows(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no row of the 2 is selected"),
        ([2], "there is no row 2: the plan has 2 rows, so choose below that"),
        ([-1], "there is no row -1"),
        ([1, 1], "row 1 is selected twice"),
        ([0.5], "rows is float64 [1]: pass integers in one dimension"),
    ],
)
def test_rows_that_cannot_be_selected(rows, message):
    with pytest.raises(LayoutError) as raised:
        two_rows().select(rows)
    assert message in str(raised.value)
