"""Ragged: nothing is copied on the way in, chosen pieces are copied exactly on the way out, bad storage is named."""

import multiprocessing
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core import LayoutError, PackingError, Ragged
from tests.processes import limited

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]
FLAT = np.array([5, 6, 7, 8, 9, 10, 11, 12], np.int32)
OFFSETS = np.array([0, 3, 4, 8])


def arrow(kind=pa.list_, value=None, documents=DOCUMENTS):
    return pa.array(documents, type=kind(value or pa.int32()))


def off_by_a_byte():
    """The second and third document at an address that no other int32 array has."""
    values = pa.py_buffer(b"." + FLAT[3:].tobytes()).slice(1)
    return pa.ListArray.from_arrays(
        pa.array([0, 1, 5], pa.int32()), pa.Array.from_buffers(pa.int32(), 5, [None, values])
    )


def forms(tmp_path):
    """The same three documents in every form that Ragged.of takes."""
    Ragged(FLAT, OFFSETS).save(tmp_path)
    padded = np.arange(20, dtype=np.int32)
    padded[4:12] = FLAT
    return {
        "flat": Ragged(FLAT, OFFSETS),
        "flat, in the middle of a buffer": Ragged(padded, OFFSETS + 4),
        "mapped": Ragged.open(tmp_path),
        "arrays": Ragged.of([np.array(d, np.int32) for d in DOCUMENTS]),
        "Python lists": Ragged.of(DOCUMENTS),
        "object array": Ragged.of(np.array([np.array(d) for d in DOCUMENTS], object)),
        "arrow list": Ragged.of(arrow()),
        "arrow large_list": Ragged.of(arrow(pa.large_list)),
        "arrow sliced": Ragged.of(arrow(documents=[[1, 2], *DOCUMENTS, [3]])[1:4]),
        "arrow chunked": Ragged.of(pa.chunked_array([arrow(documents=DOCUMENTS[:1]), arrow(documents=DOCUMENTS[1:])])),
        "arrow chunks that do not line up": Ragged.of(
            pa.chunked_array([arrow(documents=DOCUMENTS[:1]), off_by_a_byte()])
        ),
        "arrow chunked, empty chunks": Ragged.of(pa.chunked_array([arrow(documents=[]), arrow(), arrow(documents=[])])),
        "lists and arrays of mixed dtypes": Ragged.of([[5, 6, 7], [8], np.array([9, 10, 11, 12], np.uint8)]),
    }


def test_every_form_reads_the_same(tmp_path):
    for form, ragged in forms(tmp_path).items():
        assert len(ragged) == 3, form
        assert ragged.lengths.tolist() == [3, 1, 4], form
        assert ragged.lengths.dtype == np.int64, form
        assert [list(document) for document in ragged] == DOCUMENTS, form
        assert ragged[-1].tolist() == DOCUMENTS[-1], form
        with pytest.raises(IndexError):
            ragged[3]


def test_every_form_copies_chosen_pieces(tmp_path):
    for form, ragged in forms(tmp_path).items():
        out = np.zeros(9, ragged.dtype)
        # out:  . 10 11 | 7 . | 8 | 5 6 7
        at, source, start, length = (np.array(a) for a in ([6, 1, 3, 5], [0, 2, 0, 1], [0, 1, 2, 0], [3, 2, 1, 1]))
        ragged.copy_to(out, at, source, start, length)
        assert out.tolist() == [0, 10, 11, 7, 0, 8, 5, 6, 7], form


def test_every_form_survives_saving_and_pickling(tmp_path):
    for number, (form, ragged) in enumerate(forms(tmp_path).items()):
        ragged.save(tmp_path / str(number))
        for again in (Ragged.open(tmp_path / str(number)), pickle.loads(pickle.dumps(ragged))):
            assert [list(document) for document in again] == DOCUMENTS, form
            assert again.dtype == ragged.dtype, form


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_arrow_lists_are_not_copied(kind):
    array = arrow(kind, pa.int64(), [[1, 2], *DOCUMENTS])
    values = array.values.to_numpy()
    assert np.shares_memory(Ragged.of(array).values, values)
    assert np.shares_memory(Ragged.of(array[1:3]).values, values)
    chunked = Ragged.of(pa.chunked_array([array, array[:2]]))
    assert all(np.shares_memory(part.values, values) for part in chunked.parts)


def test_fixed_size_lists_and_matrices_are_not_copied():
    array = pa.array([[1, 2], [3, 4], [5, 6]], type=pa.list_(pa.int32(), 2))
    ragged = Ragged.of(array[1:])
    assert np.shares_memory(ragged.values, array.flatten().to_numpy())
    assert [list(d) for d in ragged] == [[3, 4], [5, 6]]
    matrix = np.arange(6).reshape(2, 3)
    ragged = Ragged.of(matrix)
    assert np.shares_memory(ragged.values, matrix)
    assert [list(d) for d in ragged] == [[0, 1, 2], [3, 4, 5]]


def test_arrays_are_not_copied():
    arrays = [np.arange(3), np.arange(5)]
    assert all(np.shares_memory(kept, given) for kept, given in zip(Ragged.of(arrays), arrays, strict=True))


def test_tensors_and_arrow_bools_are_taken():
    torch = pytest.importorskip("torch")
    assert Ragged.of([torch.tensor([1, 2]), torch.tensor([3])]).lengths.tolist() == [2, 1]
    mask = Ragged.of(pa.array([[True, False], [True]]))
    assert [list(d) for d in mask] == [[True, False], [True]]


def test_flat_is_one_buffer_from_its_first_token_to_its_last(tmp_path):
    for form, ragged in forms(tmp_path).items():
        flat = ragged.flat()
        assert flat.offsets.tolist() == [0, 3, 4, 8], form
        assert flat.values.tolist() == FLAT.tolist(), form
        if form.startswith(("flat", "mapped", "arrow list", "arrow sliced")):
            assert np.shares_memory(flat.values, ragged.values), form


def test_views_are_read_only():
    ragged = Ragged(FLAT, OFFSETS)
    with pytest.raises(ValueError, match="read-only"):
        ragged[0][0] = 1
    FLAT[0] = FLAT[0]  # the caller's own array stays writable


@settings(max_examples=60)
@given(st.data())
def test_pieces_are_copied_exactly_whatever_their_lengths(data):
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.float64, np.bool_]))
    around = st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 300])
    lengths = np.array(data.draw(st.lists(st.one_of(st.integers(1, 70), around), min_size=1, max_size=15)))
    documents = [(np.arange(n) * 7 + i).astype(dtype) for i, n in enumerate(lengths)]
    source = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=20)), np.int64)
    start = np.array([data.draw(st.integers(0, lengths[s] - 1)) for s in source], np.int64)
    length = np.array([data.draw(st.integers(1, lengths[s] - b)) for s, b in zip(source, start)], np.int64)
    gap = np.array([data.draw(st.integers(0, 3)) for _ in source], np.int64)
    at = np.cumsum(gap) + np.cumsum(length) - length
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    expected = np.full(int((gap + length).sum()) + 2, 77).astype(dtype)
    results = [expected.copy(), expected.copy()]
    for a, s, b, n in zip(at, source, start, length):
        expected[a : a + n] = documents[s][b : b + n]
    for result, ragged in zip(results, [Ragged(np.concatenate(documents), offsets), Ragged.of(documents)]):
        ragged.copy_to(result, at, source, start, length)
        np.testing.assert_array_equal(result, expected)


def tokens_of(ragged):
    return [list(map(int, document)) for document in ragged]


@limited()
def test_mapped_storage_is_pickled_by_path_and_opens_in_a_spawned_process(tmp_path):
    documents = [np.arange(i, i + 5000) for i in range(20)]
    Ragged.of(documents).save(tmp_path)
    mapped = Ragged.open(tmp_path)
    inside = Ragged(mapped.values[5000:], mapped.offsets[:-1])  # a view of a map has an offset of its own
    for ragged in (mapped, inside, Ragged(np.asarray(mapped.values), mapped.offsets)):
        assert len(pickle.dumps(ragged)) < 2000
        again = pickle.loads(pickle.dumps(ragged))
        assert tokens_of(again) == tokens_of(ragged)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(tokens_of, (inside,)) == tokens_of(inside)


def test_a_copy_on_write_map_is_pickled_with_its_changes(tmp_path):
    np.save(tmp_path / "v.npy", FLAT)
    changed = np.load(tmp_path / "v.npy", mmap_mode="c")
    changed[0] = 99
    assert pickle.loads(pickle.dumps(Ragged(changed, OFFSETS)))[0].tolist() == [99, 6, 7]


def test_unpickling_says_when_the_file_is_gone(tmp_path):
    Ragged.of(DOCUMENTS).save(tmp_path)
    pickled = pickle.dumps(Ragged.open(tmp_path))
    (tmp_path / "values.npy").unlink()
    with pytest.raises(PackingError, match=r"values\.npy is gone: memory-mapped sequences are pickled by path"):
        pickle.loads(pickled)
    with pytest.raises(PackingError, match=r"has no values\.npy: write the folder with Ragged\.save"):
        Ragged.open(tmp_path)


BAD = [
    (
        lambda: Ragged(FLAT, np.array([0, 5, 3, 8])),
        r"sequences\[1\] has length -2 \(offsets 5 to 3\): offsets must never decrease",
    ),
    (lambda: Ragged(FLAT, np.array([0, 3, 9])), "runs from 0 to 9 and there are 8 values"),
    (lambda: Ragged(FLAT, np.array([-1, 3])), "runs from -1 to 3"),
    (lambda: Ragged(FLAT, np.array([0.0, 3.0])), "sequences.offsets has dtype float64: pass int"),
    (lambda: Ragged(FLAT, np.array([0])), r"sequences.offsets has shape \[1\]: pass \[N\+1\]"),
    (lambda: Ragged(FLAT.reshape(2, 4), OFFSETS), r"shape \[2, 4\].*np.ascontiguousarray"),
    (lambda: Ragged(FLAT[::2], np.array([0, 3])), r"strides \[8\]: Ragged needs one flat contiguous"),
    (lambda: Ragged([1, 2], np.array([0, 2])), "sequences.values is a list: pass a numpy array"),
    (lambda: Ragged(np.array(["a"]), np.array([0, 1])), "sequences.values has dtype <U1: pass numbers"),
    (lambda: Ragged.of([]), "sequences is empty: pass at least one sequence"),
    (lambda: Ragged.of(pa.chunked_array([], pa.list_(pa.int32()))), "sequences is empty"),
    (lambda: Ragged.of(d for d in DOCUMENTS), "sequences is a generator: .*crosspack.stream"),
    (lambda: Ragged.of("text"), "sequences is a str: pass a list of token arrays"),
    (lambda: Ragged.of([[1], "ab"]), r"sequences\[1\] is text: tokenise it first"),
    (lambda: Ragged.of([[1], ["ab"]]), r"sequences\[1\] has dtype <U2: pass numbers"),
    (lambda: Ragged.of([[1], None]), r"sequences\[1\] is None: drop it"),
    (lambda: Ragged.of([1, 2]), r"sequences\[0\] is a number .* or pass \[sequences\] if it is a single"),
    (lambda: Ragged.of([1.0], name="weight"), r"weight\[0\] is a number and must .*: leave the column out, or"),
    (lambda: Ragged.of([[[1, 2], [3, 4]]]), r"sequences\[0\] has shape \[2, 2\] and must be flat"),
    (lambda: Ragged.of([[[1, 2], [3]]]), r"sequences\[0\] is not one flat sequence of numbers"),
    (lambda: Ragged.of(arrow(documents=[[1], None])), r"sequences\[1\] is null \(1 nulls.*drop_null"),
    (lambda: Ragged.of(arrow(documents=[[1], [], [2, None]])), r"sequences\[2\] holds a null token .*fill"),
    (lambda: Ragged.of(pa.array([1, 2])), "sequences is an Arrow array of int64: cast it to list"),
    (
        lambda: Ragged.of(pa.array([[1]], type=pa.list_view(pa.int32()))),
        "Arrow array of list_view<item: int32>: cast it to list",
    ),
    (lambda: Ragged.of(pa.array([["a"]])), "sequences.values has dtype object: pass numbers"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_storage_is_named_with_the_way_out(make, message):
    with pytest.raises(PackingError, match=message):
        make()


def test_the_name_stands_in_the_message():
    with pytest.raises(LayoutError, match=r"labels\[0\] is None"):
        Ragged.of([None], name="labels")
