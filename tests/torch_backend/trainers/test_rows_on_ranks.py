"""Two ranks hold every document of a data set once, and one update is that of the documents alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.torch_backend.ranks import everyones, on_ranks
from tests.torch_backend.row_trainers import enabled, held, numbered
from tests.torch_backend.trainers.test_trainer import arguments, datasets, differences, llama

pytestmark = pytest.mark.slow  # starts processes that train


def data_of(kind: str) -> datasets.Dataset:
    if kind == "three long documents":  # three rows that cannot be cut: at one step a rank has an empty row
        return datasets.Dataset.from_dict({"input_ids": [[5] * 30, [6] * 31, [7] * 32]})
    return numbered()


def on_rank(kind: str, folder: Path) -> dict[str, Any]:
    data = data_of(kind)
    given = arguments(transformers.TrainingArguments, folder)
    given.max_steps = 1
    given.per_device_train_batch_size = 1 if kind == "three long documents" else 2
    source = data.to_iterable_dataset() if kind == "stream" else data
    trainer = enabled(transformers.Trainer(llama(), given, train_dataset=source))
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = list(loader)
        shapes = [tuple(batch["input_ids"].shape) for batch in batches]
        epochs.append(everyones((held(batches), shapes)))
    trainer.args.gradient_accumulation_steps = len(epochs[0][0][1])
    trainer.train()
    return {"epochs": epochs, "error": differences(trainer.model, alone(data))}


def alone(data: datasets.Dataset) -> torch.nn.Module:
    """The model after one step of gradient descent on all documents, each in a forward of its own."""
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in (torch.tensor(x) for x in data["input_ids"]):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
    (torch.stack(losses).sum() / sum(len(ids) - 1 for ids in data["input_ids"])).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["documents", "stream", "three long documents"])
def test_two_ranks_hold_every_document_once_and_train_as_the_documents_alone(tmp_path: Path, kind: str) -> None:
    found = on_ranks(on_rank, kind, tmp_path)
    wanted = sorted((ids[0] - 3, len(ids)) for ids in data_of(kind)["input_ids"])
    for (one, shapes), (two, others) in found["epochs"]:
        assert sorted(one + two) == wanted
        assert shapes == others
    assert found["error"] < 1e-6
