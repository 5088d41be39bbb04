"""Data sets of pack_dataset whose column of lengths was dropped: their description says that they are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import torch_backend
from packing_core.errors import LayoutError
from tests.torch_backend.models import PLAIN_SGD, documents, tiny
from torch_backend.trainers.enable_packing import enable_packing
from torch_backend.trainers.hf_dataset import pack_dataset

datasets = pytest.importorskip("datasets", reason="pack_dataset takes and returns one")

LOST = (
    r"came packed from crosspack\.pack_dataset, and its seq_lengths were dropped.* crosspack\.PackedCollator\(model\)"
)
LENGTHS = (5, 19, 33, 7, 20, 20, 24)


def packed_rows() -> Any:
    """Rows of 64 tokens, each of which holds several documents."""
    rows = pack_dataset(datasets.Dataset.from_dict({"input_ids": [x.tolist() for x in documents(LENGTHS)]}), 64)
    assert all(len(lengths) > 1 for lengths in rows["seq_lengths"])
    return rows


def saved(rows: Any, folder: Path) -> Any:
    """The rows as another process loads them."""
    rows.save_to_disk(folder)
    return datasets.load_from_disk(folder)


@pytest.mark.parametrize("how", ["remove_columns", "select_columns", "map", "loaded"])
def test_packing_and_audits_refuse_rows_without_lengths(tmp_path: Path, how: str) -> None:
    rows = packed_rows()
    rows = saved(rows, tmp_path / "rows") if how == "loaded" else rows
    if how == "select_columns":
        rows = rows.select_columns(["input_ids", "labels"])
    elif how == "map":
        rows = rows.map(lambda x: {"text": ""}, remove_columns=["seq_lengths"])
    else:
        rows = rows.remove_columns("seq_lengths")
    with pytest.raises(LayoutError, match=f"^the dataset {LOST}"):
        pack_dataset(rows, 64)
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), **PLAIN_SGD)
    trainer = transformers.Trainer(tiny("llama"), arguments, train_dataset=rows)
    with pytest.raises(LayoutError, match=f"^example of Trainer 0 {LOST}"):
        torch_backend.audit(trainer)
    with pytest.raises(LayoutError, match=f"training example 0 {LOST}"):
        enable_packing(trainer, capacity=64, verify=False)
    trainer = transformers.Trainer(tiny("llama"), arguments, train_dataset=list(documents()), eval_dataset={"a": rows})
    with pytest.raises(LayoutError, match=f"a example 0 {LOST}"):
        enable_packing(trainer, capacity=64, verify=False)


def test_documents_that_were_made_of_rows_again_are_packed(tmp_path: Path) -> None:
    def cut_up(rows: Any) -> dict[str, Any]:
        given = zip(rows["input_ids"], rows["seq_lengths"], strict=True)
        return {"input_ids": [part.tolist() for ids, lengths in given for part in torch.tensor(ids).split(lengths)]}

    rows = packed_rows()
    documents_again = rows.map(cut_up, batched=True, remove_columns=rows.column_names)
    with pytest.raises(LayoutError, match=r"If the data set holds documents again, say so: dataset\.info\.description"):
        pack_dataset(documents_again, 64)
    documents_again.info.description = ""
    assert len(pack_dataset(documents_again, 64)) == len(rows)
