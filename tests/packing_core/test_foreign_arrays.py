"""Arrays as other libraries hold them: read exactly, or refused by name; maps travel to workers as places in files."""

import multiprocessing
import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from packing_core import LayoutError, PackingError, Ragged, pack, plan
from tests.packing_core.test_ragged import tokens_of
from tests.processes import limited

BIG = [np.array([5, 6, 7], ">i4"), np.array([8, 9], ">i4")]


def test_arrays_of_the_other_byte_order_are_converted() -> None:
    forms = {
        "list": BIG,
        "flat": Ragged(np.array([5, 6, 7, 8, 9], ">i4"), np.array([0, 3, 5], ">i8")),
        "mixed": [BIG[0], np.array([8, 9], "<i4")],
    }
    for form, documents in forms.items():
        assert pack(documents, 8, seed=None).input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]], form
    assert pack(np.array([[1, 2], [3, 4]], ">u2"), 2, seed=None).input_ids.tolist() == [[1, 2], [3, 4]]
    column = pack(BIG, 5, columns={"x": [np.array([0.5, 1, 2], ">f4"), np.array([3, 4], ">f4")]}, seed=None).columns[
        "x"
    ]
    assert column.tolist() == [[0.5, 1, 2, 3, 4]]
    assert plan(np.array([3, 2], ">i8"), 5).n_tokens == 5


@pytest.mark.parametrize("cut", [np.s_[:, :1], np.s_[:, ::2], np.s_[::2, 1:], np.s_[::-1, ::-1]])
def test_matrices_with_strides_are_copied(cut) -> None:
    matrix = np.arange(12).reshape(3, 4)[cut]
    assert tokens_of(Ragged.of(matrix)) == matrix.tolist()
    assert tokens_of(Ragged.of(np.broadcast_to(np.arange(3), (2, 3)))) == [[0, 1, 2], [0, 1, 2]]


class Chunked(list):
    """As an array of dask, zarr or h5py: it has chunks, and is no Arrow array."""

    chunks = (2, 2)


class Unreadable:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("not on this device")


def with_grad():
    torch = pytest.importorskip("torch")
    return torch.ones(2, requires_grad=True)


def test_objects_with_chunks_are_read_as_the_sequences_that_they_are() -> None:
    assert tokens_of(Ragged.of(Chunked([[1, 2], [3]]))) == [[1, 2], [3]]


def test_lists_of_a_map_are_read_like_others() -> None:
    sliced = pa.array([[1, 2], [3], [None]])[1:2]  # a null beside it is not in it
    assert tokens_of(Ragged.of(pa.chunked_array([sliced, sliced]))) == [[3], [3]]


VALUES = np.arange(8)
BAD = [
    (
        lambda: Ragged(VALUES, np.array([0, 5, 3, 8], np.uint32)),
        r"sequences\[1\] has length -2 \(offsets 5 to 3\): offsets must never decrease",
    ),
    (lambda: Ragged.of([np.ma.array([1, 2], mask=[0, 1])]), r"sequences\[0\] is a masked array: fill it"),
    (lambda: Ragged(np.ma.array(VALUES), [0, 8]), "sequences.values is a masked array: fill it"),
    (
        lambda: Ragged.of([np.array([1], np.uint64), np.array([2], np.int64)]),
        "sequences mixes int64 and uint64, which no integer dtype holds: convert them to one",
    ),
    (lambda: Ragged.of([[1, 2**70]]), r"sequences\[0\] holds 1180591620717411303424 at 1, which does not"),
    (lambda: Ragged.of([[1], [2, None]]), r"sequences\[1\] holds a null at 1: drop or fill it"),
    (lambda: pack([[1.5]], 4), "sequences has dtype float64: pass integer token ids"),
    (lambda: Ragged.of([with_grad()]), r"sequences\[0\] is not one flat sequence of numbers: .*requires grad.*detach"),
    (lambda: Ragged.of([Unreadable()]), r"sequences\[0\] is not .*: not on this device"),
    (lambda: Ragged.of({(1, 2)}), "sequences is a set: pass a list of token arrays"),
    (lambda: Ragged.of(5), "sequences is a int: pass a list"),
    (lambda: Ragged.of(np.array(5)), "sequences is a ndarray: pass a list"),
    (lambda: Ragged.of(SimpleNamespace(chunks=[1])), "sequences is a SimpleNamespace: pass a"),
    (lambda: Ragged.of(pa.table({"a": [[1]]})), r'is a pyarrow Table: pass one column of it, table\["input'),
    (lambda: Ragged.of(pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8()))), "an Arrow array of map<"),
    (lambda: Ragged.of(pa.array(["a"]).dictionary_encode()), "an Arrow array of dictionary<"),
    (lambda: Ragged.of(pa.chunked_array([[[1]], [[2], None]])), r"sequences\[2\] is null \(1 nulls in all\)"),
    (lambda: Ragged.of(pa.chunked_array([[[1]], [[2], [None]]])), r"sequences\[2\] holds a null token"),
    (lambda: Ragged.of([[1]])[1], "there is no sequence 1: sequences are numbered 0 to 0"),
    (lambda: Ragged.open(5), "5 is no folder of Ragged.save .*: write it with"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_cannot_be_read_is_named_with_the_way_out(call, message) -> None:
    with pytest.raises(PackingError, match=message):
        call()


def arrow_file(folder, rows_per_batch=500):
    """A memory-mapped column of 2,000 documents in several record batches, as a data set of Hugging Face has it."""
    documents = [np.arange(i, i + 20 + i % 7, dtype=np.int32) for i in range(2000)]
    table = pa.table({"input_ids": pa.array(documents)})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    with pa.memory_map(str(folder / "data.arrow")) as file:
        return documents, pa.ipc.open_stream(file).read_all()["input_ids"]


@pytest.mark.parametrize("rows_per_batch", [500, 2000])
@limited()
def test_a_mapped_arrow_column_is_pickled_by_path(tmp_path, rows_per_batch) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    documents, column = arrow_file(folder, rows_per_batch)
    ragged = Ragged.of(column)
    pickled = pickle.dumps(ragged)
    assert len(pickled) < 2500
    expected = [document.tolist() for document in documents]
    assert tokens_of(pickle.loads(pickled)) == tokens_of(ragged) == expected
    assert len(pickle.dumps(pickle.loads(pickled))) < 2500
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(tokens_of, (ragged,)) == expected


def test_a_map_whose_file_is_gone_or_replaced_is_pickled_whole(tmp_path) -> None:
    documents, column = arrow_file(tmp_path)
    (tmp_path / "data.arrow").unlink()
    whole = pickle.dumps(Ragged.of(column))
    (tmp_path / "data.arrow").write_bytes(b"something else")
    assert min(len(whole), len(pickle.dumps(Ragged.of(column)))) > 4 * sum(map(len, documents))


def test_strided_maps_are_pickled_with_what_they_show(tmp_path) -> None:
    np.save(tmp_path / "offsets.npy", np.array([0, 99, 3, 99, 8, 99]))
    offsets = np.load(tmp_path / "offsets.npy", mmap_mode="r")[::2]
    ragged = Ragged(VALUES, offsets)
    assert tokens_of(pickle.loads(pickle.dumps(ragged))) == tokens_of(ragged) == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_a_mapped_file_that_shrank_is_refused(tmp_path) -> None:
    Ragged.of([[1, 2, 3]]).save(tmp_path)
    pickled = pickle.dumps(Ragged.open(tmp_path))
    (tmp_path / "values.npy").write_bytes(b"short")
    with pytest.raises(PackingError, match=r"values\.npy is shorter than it was when .* were pickled"):
        pickle.loads(pickled)
    with pytest.raises(PackingError, match=r"is no folder of Ragged\.save \(.*\): write it with Ragged\.save"):
        Ragged.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PackingError, match=r"cannot be written \(.*\): pass a folder with room"):
        Ragged.of([[1]]).save(tmp_path / "file")


def test_empty_documents_survive_a_folder(tmp_path) -> None:
    Ragged.of([[], []]).save(tmp_path)
    assert Ragged.open(tmp_path).lengths.tolist() == [0, 0]
    with pytest.raises(LayoutError, match="sequences.offsets has shape"):
        Ragged(VALUES, np.zeros((2, 2), int))
