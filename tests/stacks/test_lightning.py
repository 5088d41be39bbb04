"""The callback for Lightning on a stand-in; ``python -m tests.stacks lightning`` trains in a release."""

from __future__ import annotations

import pytest
import torch

import crosspack
from packing_core.errors import PackingError
from tests.torch_backend.trainers.test_trainer import documents, llama

Module = torch.nn.Module


def module(model) -> Module:
    return torch.nn.ModuleDict({"model": model})  # as a LightningModule holds it


def packed(model, count=6):
    found = documents(count)
    rows = crosspack.PackedDataset(list(found["input_ids"]), 40, labels=list(found["labels"]))
    return crosspack.PackedCollator(model)([rows[i] for i in range(len(rows))])


def test_the_callback_patches_the_model_of_a_module_and_a_step_that_drops_the_segments_raises(plugin) -> None:
    made = module(llama())
    batch = packed(made["model"])
    plugin.LightningPacking(verify=False).setup(None, made, "fit")
    made["model"](torch.zeros_like(batch["input_ids"]))  # other tokens, such as a teacher's
    with pytest.raises(PackingError, match=r"its boundaries were left out, .* model\(\*\*batch\)"):
        made["model"](batch["input_ids"], labels=batch["labels"])
    assert made["model"](**batch).loss > 0
