"""Rows of pack_dataset whose boundaries were left out on their way to a model: nobody trains them as one document."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

import torch_backend
from packing_core.errors import LayoutError
from tests.torch_backend.models import PLAIN_SGD, documents, patched, tiny
from torch_backend import PackedCollator, known_rows, with_boundaries
from torch_backend.trainers.enable_packing import enable_packing
from torch_backend.trainers.hf_dataset import pack_dataset

datasets = pytest.importorskip("datasets", reason="pack_dataset takes and returns one")

LOST = (
    r"came packed from crosspack\.pack_dataset, and its seq_lengths were dropped.* crosspack\.PackedCollator\(model\)"
)
LENGTHS = (5, 19, 33, 7, 20, 20, 24)


def packed_rows(*, prompts: bool = False) -> Any:
    """Rows of 64 tokens, each of which holds several documents."""
    ids = [document.tolist() for document in documents(LENGTHS)]
    columns = {"input_ids": ids, **({"prompt_length": [2] * len(ids)} if prompts else {})}
    rows = pack_dataset(datasets.Dataset.from_dict(columns), 64)
    assert all(len(lengths) > 1 for lengths in rows["seq_lengths"])
    return rows


DROPPED: dict[str, Callable[[Any], Any]] = {
    "select_columns": lambda rows: rows.select_columns(["input_ids", "labels"]),
    "remove_columns": lambda rows: rows.remove_columns("seq_lengths"),
    "map": lambda rows: rows.map(lambda x: {"text": ""}, remove_columns=["seq_lengths"]),
    "with_format": lambda rows: rows.with_format("torch", columns=["input_ids", "labels"]),
}


def saved(rows: Any, folder: Path) -> Any:
    """The rows as another process loads them."""
    rows.save_to_disk(folder)
    known_rows.forget()
    return datasets.load_from_disk(folder)


def flattened(features: list[Any]) -> dict[str, Any]:
    return dict(transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features))


def padded(features: list[Any]) -> dict[str, Tensor]:
    tensors = [torch.tensor(x["input_ids"]) for x in features]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence([*tensors, torch.zeros(70).long()], True)[:-1]}


def cut(features: list[Any], size: int) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([torch.tensor(x["input_ids"])[:size] for x in features])}


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("how", DROPPED)
def test_a_patched_model_knows_rows_whose_lengths_were_dropped(how: str, prompts: bool) -> None:
    rows, model = DROPPED[how](packed_rows(prompts=prompts)), patched()
    for batch in DataLoader(rows, batch_size=1, collate_fn=transformers.default_data_collator):
        with pytest.raises(LayoutError, match=f"^row 0 of input_ids {LOST}"):
            model(**{name: batch[name] for name in ("input_ids", "labels")})


@pytest.mark.parametrize(
    "collator",
    [padded, partial(cut, size=60), flattened, transformers.DataCollatorWithFlattening()],
    ids=["padded", "cut", "flattened", "flattened by positions"],
)
def test_rows_are_known_however_a_collator_shapes_them(collator: Any) -> None:
    rows, model = packed_rows().select_columns(["input_ids", "labels"]), patched()
    with pytest.raises(LayoutError, match="row 0 of input_ids came packed|position_ids restart inside"):
        model(**collator([rows[0], rows[1]]))
    with pytest.raises(LayoutError, match="row 0 of input_ids came packed"):
        model(**collator([rows[0]]))


@pytest.mark.parametrize("part", [slice(None, -1), slice(1, None)], ids=["before the last", "after the first"])
def test_rows_that_a_loop_shifts_itself_are_known(part: slice) -> None:
    with pytest.raises(LayoutError, match=LOST):
        patched().model(input_ids=torch.tensor(packed_rows()["input_ids"][1])[None, part])


def test_rows_that_are_read_from_the_cache_are_known(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"input_ids": [d.tolist() for d in documents(LENGTHS)]}).save_to_disk(tmp_path)
    data = datasets.load_from_disk(tmp_path)
    pack_dataset(data, 64)
    known_rows.forget()
    rows = pack_dataset(data, 64)
    with pytest.raises(LayoutError, match=LOST):
        patched()(input_ids=torch.tensor(rows["input_ids"][-1])[None])


def test_documents_and_rows_with_their_lengths_train() -> None:
    rows, model = packed_rows(), patched()
    for row in rows:
        model(**PackedCollator(model)([row]))
        for document in torch.tensor(row["input_ids"]).split(row["seq_lengths"]):
            model(input_ids=document[None], labels=document[None])
            PackedCollator(model)([{"input_ids": document}])


@pytest.mark.parametrize("packs", [PackedCollator(), with_boundaries(transformers.DataCollatorWithFlattening())])
def test_collators_that_would_take_a_row_for_a_document_raise(packs: Any) -> None:
    rows = packed_rows().select_columns(["input_ids", "labels"])
    with pytest.raises(LayoutError, match=f"^example 1 {LOST}"):
        packs([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, rows[0]])


@pytest.mark.parametrize("loaded", [True, False], ids=["of another process", "of this process"])
def test_packing_and_audits_refuse_rows_without_lengths(tmp_path: Path, loaded: bool) -> None:
    rows = packed_rows()
    rows = (saved(rows, tmp_path / "rows") if loaded else rows).remove_columns("seq_lengths")
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


def test_an_sft_trainer_of_a_patched_model_that_pads_rows_raises(tmp_path: Path) -> None:
    """TRL's collator reads seq_lengths under padding_free=True alone."""
    trl = pytest.importorskip("trl", reason="its SFTTrainer")
    from tests.torch_backend.trainers.test_trainer import sft

    trainer = sft(patched(), tmp_path, packed_rows(), padding_free=False, bf16=False)
    assert isinstance(trainer, trl.SFTTrainer)
    with pytest.raises(LayoutError, match=LOST):
        trainer.train()
