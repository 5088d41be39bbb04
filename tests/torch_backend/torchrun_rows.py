"""Run by ``torchrun`` in test_rows: what each of two ranks is given, and one update against the documents alone.

Arguments: the folder to write to, and what the data are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from torch import distributed as dist
from torch.nn import functional as F

from tests.torch_backend.row_trainers import held, numbered
from tests.torch_backend.test_trainer import CAPACITY, arguments, datasets, differences, llama
from tests.torch_backend.torchrun import leave
from torch_backend.trainers.enable_packing import enable_packing


def data_of(kind: str) -> datasets.Dataset:
    if kind == "three long documents":  # three rows that cannot be cut: at one step a rank has an empty row
        return datasets.Dataset.from_dict({"input_ids": [[5] * 30, [6] * 31, [7] * 32]})
    return numbered()


def main(folder: Path, kind: str) -> None:
    data = data_of(kind)
    given = arguments(transformers.TrainingArguments, folder)
    given.max_steps = 1
    given.per_device_train_batch_size = 1 if kind == "three long documents" else 2
    source = data.to_iterable_dataset() if kind == "stream" else data
    trainer = transformers.Trainer(llama(), given, train_dataset=source)
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = list(loader)
        epochs.append({"held": held(batches), "shapes": [tuple(batch["input_ids"].shape) for batch in batches]})
    trainer.args.gradient_accumulation_steps = len(epochs[0]["shapes"])
    trainer.train()
    result = {
        "epochs": epochs,
        "wanted": sorted((ids[0] - 3, len(ids)) for ids in data["input_ids"]),
        "error": differences(trainer.model, alone(data)),
    }
    torch.save(result, folder / f"rank{dist.get_rank()}.pt")


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave()
