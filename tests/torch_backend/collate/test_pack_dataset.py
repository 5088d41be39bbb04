"""pack_dataset from Arrow to Arrow: the rows of the plan, in the dtypes given, cached as datasets.map caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from packing_core import PackedDataset
from packing_core.errors import CapacityError, LayoutError
from torch_backend import PackedCollator
from torch_backend.trainers import hf_dataset as training_dataset
from torch_backend.trainers.hf_dataset import pack_dataset

datasets = pytest.importorskip("datasets", reason="pack_dataset takes and returns one")
pa = pytest.importorskip("pyarrow", reason="datasets brings it")

CAPACITY = 32


def columns(count: int = 300, longest: int = 60) -> dict[str, list]:
    """Documents with labels, a mask and a prompt, which all leave out something else."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 1000, n).tolist() for n in rng.integers(1, longest, count)]
    return {
        "input_ids": ids,
        "labels": [[-100 if token % 7 == 0 else token for token in x] for x in ids],
        "completion_mask": [[int(token % 5 != 0) for token in x] for x in ids],
        "prompt_length": [min(len(x), 3) for x in ids],
    }


def on_disk(folder: Path, data: dict[str, list]) -> datasets.Dataset:
    """A dataset of many chunks in a memory-mapped file."""
    table = pa.Table.from_batches(datasets.Dataset.from_dict(data).data.table.to_batches(max_chunksize=7))
    datasets.Dataset(table).save_to_disk(folder)
    return datasets.load_from_disk(folder)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop", "overlap", "restart"])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_rows_are_those_of_a_packed_dataset(tmp_path, monkeypatch, overflow, where) -> None:
    monkeypatch.setattr(training_dataset, "BLOCK_TOKENS", 5 * CAPACITY)
    data = columns()
    given = datasets.Dataset.from_dict(data) if where == "memory" else on_disk(tmp_path, data)
    rows = pack_dataset(given, CAPACITY, overflow=overflow, seed=3)
    wanted = PackedDataset(
        data["input_ids"],
        CAPACITY,
        labels=data["labels"],
        loss_mask=data["completion_mask"],
        prompt_lengths=data["prompt_length"],
        overflow=overflow,
        seed=3,
    )[:].to_dict("trl")
    assert len(rows) == len(wanted["input_ids"]) > 5
    for name, values in wanted.items():
        assert rows[name][:] == [x.tolist() for x in values], name


def test_rows_are_mixed_by_default() -> None:
    data = datasets.Dataset.from_dict(columns(longest=CAPACITY))
    mixed, by_length = (pack_dataset(data, CAPACITY, strategy=strategy)[:] for strategy in ("mixed", "best_fit"))
    assert pack_dataset(data, CAPACITY)[:] == mixed != by_length


def test_tokens_keep_their_dtype_and_labels_can_hold_minus_100() -> None:
    for given, labels in ((pa.int32(), "int32"), (pa.int64(), "int64"), (pa.uint16(), "int32")):
        table = pa.table({"input_ids": pa.array([[5, 6, 7], [8]], pa.list_(given))})
        rows = pack_dataset(datasets.Dataset(table), 4, seed=None)
        assert rows.features["input_ids"].feature.dtype == str(given)
        assert rows.features["labels"].feature.dtype == labels
        assert rows[0] == {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "seq_lengths": [3, 1]}


def test_an_attention_mask_of_ones_changes_nothing_and_one_with_padding_does(tmp_path) -> None:
    ids = [[5, 6, 7], [8, 9]]
    for mask, kept in (([[1, 1, 1], [1, 1]], [5, 6, 7, 8, 9]), ([[0, 1, 1], [1, 0]], [6, 7, 8])):
        rows = pack_dataset(datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": mask}), 8, seed=None)
        assert rows[0]["input_ids"] == kept


def test_labels_can_be_left_to_the_collator(tmp_path) -> None:
    """With every token trained, both ways give the same batch, and each has its own cache."""
    data = on_disk(tmp_path, {"input_ids": columns(longest=CAPACITY)["input_ids"]})
    rows, bare = (pack_dataset(data, CAPACITY, labels=labels) for labels in (True, False))
    assert bare.column_names == ["input_ids", "seq_lengths"] and bare[:].items() <= rows[:].items()
    collate = PackedCollator(capacity=CAPACITY, strategy="sequential")
    both = [collate([each[row] for row in range(3)]) for each in (rows, bare)]
    assert torch.equal(both[0]["labels"], both[1]["labels"]) and (both[0]["labels"] == -100).sum() > 3
    trained = datasets.Dataset.from_dict(columns(longest=CAPACITY))
    for name in ("labels", "completion_mask", "prompt_length"):
        with pytest.raises(LayoutError, match="says which tokens are trained, and rows without labels would train all"):
            pack_dataset(trained.select_columns(["input_ids", name]), CAPACITY, labels=False)


def test_rows_of_a_file_are_cached_beside_it_and_read_again(tmp_path, monkeypatch) -> None:
    data = on_disk(tmp_path, columns(longest=CAPACITY))
    first = pack_dataset(data, CAPACITY)
    (file,) = tmp_path.glob("cache-*")
    assert first.cache_files[0]["filename"] == str(file)
    with monkeypatch.context() as patched:
        patched.setattr(training_dataset, "_rows", None)  # nothing is packed again
        again = pack_dataset(datasets.load_from_disk(tmp_path), CAPACITY)
    assert again[:] == first[:] and again._fingerprint == first._fingerprint
    other = pack_dataset(data, CAPACITY, seed=1)
    assert other[:] != first[:] and len(list(tmp_path.glob("cache-*"))) == 2


def test_a_dataset_that_was_selected_from_is_packed_as_selected(tmp_path) -> None:
    data = on_disk(tmp_path, columns(longest=CAPACITY))
    chosen = data.select([5, 3, 250])
    rows = pack_dataset(chosen, 128, strategy="sequential", seed=None)
    assert rows[0]["input_ids"] == [token for i in (5, 3, 250) for token in data[i]["input_ids"]]


def test_what_cannot_be_packed_leaves_no_file_behind(tmp_path) -> None:
    data = on_disk(tmp_path, columns())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CapacityError, match="tokens and capacity is 32"):
        pack_dataset(data, CAPACITY)
    assert sorted(tmp_path.iterdir()) == before
