"""PackedDataset and pack: rows on access equal rows at once, storage stays where it is, bad input is named early."""

import multiprocessing
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core import CapacityError, LayoutError, PackedDataset, PackingError, Ragged, pack, plan
from tests.packing_core.packings import packings
from tests.processes import limited

STORED = ("input_ids", "cu_seqlens", "rows", "sources", "starts", "labels", "loss_mask")


def assert_same(batch, other):
    for name in STORED:
        if getattr(other, name) is None:
            assert getattr(batch, name) is None, name
        else:
            np.testing.assert_array_equal(getattr(batch, name), getattr(other, name), err_msg=name)
    assert list(batch.columns) == list(other.columns)
    for name, column in other.columns.items():
        np.testing.assert_array_equal(batch.columns[name], column, err_msg=name)


@settings(max_examples=80)
@given(packings(), st.data())
def test_rows_on_access_are_the_rows_of_the_whole(packing, data):
    dataset = PackedDataset(packing.documents, packing.plan, **packing.arrays, pad_id=3)
    whole = pack(packing.documents, packing.plan, **packing.arrays, pad_id=3)
    assert len(dataset) == len(whole) == packing.plan.n_rows
    row = data.draw(st.integers(-len(whole), len(whole) - 1))
    rows = data.draw(st.lists(st.integers(-len(whole), len(whole) - 1), min_size=1, max_size=5))
    assert_same(dataset[row], whole[row])
    assert_same(dataset[np.int32(row)], whole[row])
    assert_same(dataset[rows], whole[rows])
    assert_same(dataset.__getitems__(rows), whole[rows])
    assert_same(dataset[1:3], whole[1:3])
    assert_same(dataset[:], whole)


def mapped(folder):
    documents = [np.arange(i, i + 50 + i % 7, dtype=np.int32) for i in range(2000)]
    Ragged.of(documents).save(folder / "ids")
    Ragged.of([np.where(d % 3, d, -100) for d in documents]).save(folder / "labels")
    return PackedDataset(
        Ragged.open(folder / "ids"),
        512,
        labels=Ragged.open(folder / "labels"),
        columns={"x": Ragged.open(folder / "ids")},
        prompt_lengths=[3] * 2000,
    )


def test_only_the_plan_is_pickled_of_mapped_documents(tmp_path):
    dataset = mapped(tmp_path)
    size = len(pickle.dumps(dataset))
    assert size < dataset.sequences.values.nbytes / 3
    assert size < 5 * 8 * dataset.plan.length.size  # row offsets, source, start, length and prompts, and little else
    assert_same(pickle.loads(pickle.dumps(dataset))[:], dataset[:])


def row_sums(dataset, rows):
    return [int(dataset[row].input_ids.sum()) for row in rows]


@limited()
def test_spawned_workers_read_the_same_rows(tmp_path):
    dataset = mapped(tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(row_sums, (dataset, [0, 7, -1])) == row_sums(dataset, [0, 7, -1])


def test_documents_stay_where_they_are():
    values = np.arange(10, dtype=np.int32)
    dataset = PackedDataset(Ragged(values, np.array([0, 4, 10])), 10)
    values[4] = 77  # seen on the next access: nothing was copied
    assert 77 in dataset[0].input_ids


DOCUMENTS = [[1, 2, 3], [4, 5]]
BAD = [
    (
        {"capacity_or_plan": 2},
        CapacityError,
        r'document 0 has 3 tokens and capacity is 2: .*overflow="split".*"truncate"',
    ),
    ({"sequences": [[1], []]}, PackingError, "document 1 "),
    ({"sequences": []}, PackingError, "sequences is empty: pass at least one sequence"),
    ({"capacity_or_plan": 0}, PackingError, "capacity"),
    ({"capacity_or_plan": -4}, PackingError, "capacity"),
    ({"sequences": [[1.0, 2.0]]}, LayoutError, "sequences has dtype float64: pass integer token ids"),
    ({"sequences": [[True]]}, LayoutError, "sequences has dtype bool: pass integer token ids"),
    ({"stragety": "best_fit"}, TypeError, "stragety"),
    (
        {"capacity_or_plan": plan([3, 2], 4), "seed": 1},
        PackingError,
        "seed cannot change a plan that is made: pass a capacity instead",
    ),
    (
        {"capacity_or_plan": plan([3, 2, 1], 4)},
        LayoutError,
        "the plan was made for 3 documents and there are 2: plan these documents",
    ),
    (
        {"capacity_or_plan": plan([3, 3], 4)},
        LayoutError,
        "the plan takes tokens up to 3 of document 1, which has 2: plan these",
    ),
    (
        {"sequences": [np.array([1], np.uint8)], "pad_id": -1},
        PackingError,
        "pad_id -1 does not fit into the documents' dtype uint8",
    ),
    ({"pad_id": 0.5}, PackingError, r"pad_id is 0\.5: pass an integer"),
    ({"weighting": "row"}, PackingError, "weighting must be one of 'token', 'document'; got 'row'"),
    ({"labels": [[1, 2, 3]]}, LayoutError, "labels has 1 sequences and there are 2 documents: they must"),
    (
        {"labels": [[1, 2, 3], [4]]},
        LayoutError,
        r"labels\[1\] has 1 entries and document 1 has 2 tokens: give one entry per token \(1 documents differ\)",
    ),
    ({"labels": [[1.0] * 3, [1.0] * 2]}, LayoutError, "labels has dtype float64: pass signed integers"),
    (
        {"labels": [np.zeros(3, np.uint16), np.zeros(2, np.uint16)]},
        LayoutError,
        r"labels has dtype uint16: pass signed integers \(-100 is none\)",
    ),
    ({"loss_mask": [[0.5] * 3, [1.0] * 2]}, LayoutError, "loss_mask has dtype float64: pass bool, or 0 and 1"),
    ({"loss_mask": [[1], [1]]}, LayoutError, r"loss_mask\[0\] has 1 entries and document 0 has 3 tokens"),
    ({"prompt_lengths": [1]}, LayoutError, r"prompt_lengths is int64 \[1\] and there are 2 documents: pass one"),
    ({"prompt_lengths": [1.0, 2.0]}, LayoutError, r"prompt_lengths is float64 \[2\]"),
    ({"prompt_lengths": [1, 3]}, LayoutError, r"prompt_lengths\[1\] is 3 and document 1 has 2 tokens: pass 0 to 2"),
    ({"prompt_lengths": [-1, 0]}, LayoutError, r"prompt_lengths\[0\] is -1"),
    (
        {"columns": {"position_ids": DOCUMENTS}},
        PackingError,
        r"columns\['position_ids'\] has the name of a PackedBatch field: choose another name",
    ),
    ({"columns": {"x": [[1], [1]]}}, LayoutError, r"columns\['x'\]\[0\] has 1 entries and document 0 has 3"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD)
def test_bad_input_is_named_before_a_row_is_made(changes, kind, message):
    arguments = {"sequences": DOCUMENTS, "capacity_or_plan": 4} | changes
    with pytest.raises(kind, match=message):
        PackedDataset(arguments.pop("sequences"), arguments.pop("capacity_or_plan"), **arguments)


class Table:
    """Holds what is read of a datasets.Dataset, which packing_core does not import."""

    def __init__(self, columns: dict) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select_columns(self, names: list) -> "Table":
        return Table({name: self.columns[name] for name in names})

    def with_format(self, _: str) -> "Table":
        return self

    def __getitem__(self, _: slice) -> dict:
        return self.columns


IDS, LABELS = [[5, 6, 7], [8, 9], [3, 4, 2, 1]], [[-100, 6, 7], [-100, 9], [-100, 4, 2, 1]]
COLUMNS = {"input_ids": IDS, "labels": LABELS, "attention_mask": [[1] * len(x) for x in IDS], "text": ["a", "b", "c"]}


@pytest.mark.parametrize(
    "examples", [Table(COLUMNS), [dict(zip(COLUMNS, x, strict=True)) for x in zip(*COLUMNS.values(), strict=True)]]
)
def test_a_dataset_and_a_list_of_examples_are_packed_by_their_columns(examples):
    right = pack(IDS, 5, labels=LABELS)
    for found in (pack(examples, 5), PackedDataset(examples, 5)[:]):
        assert np.array_equal(found.input_ids, right.input_ids) and np.array_equal(found.targets, right.targets)
    with pytest.raises(LayoutError, match="the examples say labels, and labels= was passed: leave one of them out"):
        pack(examples, 5, labels=LABELS)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (Table({"text": ["a"]}), "the dataset has no input_ids, only text: tokenise it first"),
        ([{"text": "a"}], "a feature has no input_ids"),
        ([{"input_ids": [1]}, [1]], "example 1 is a list: pass mappings with input_ids"),
        ([{"input_ids": [1]}, {"input_ids": []}], "document 1 is empty"),
    ],
)
def test_examples_that_hold_no_tokens_are_named(examples, message):
    with pytest.raises(PackingError, match=message):
        pack(examples, 5)
