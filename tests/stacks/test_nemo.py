"""Rows of NeMo AutoModel by a stand-in for its collator; ``python -m tests.stacks nemo`` runs the released one."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import crosspack
from packing_core.errors import UnsupportedModelError
from tests.stacks.runs import weights_of
from tests.stacks.training import alone, documents_of, worst_error
from tests.torch_backend.trainers.test_trainer import documents, llama

CONTRACT = SimpleNamespace(packed_mask_type="document_ids", requires_packed_sequence_metadata=False)


def row(texts, width=64):
    """A row of ``neat_pack_dataset``, whose labels are shifted."""
    found = {"input_ids": [], "labels": [], "position_ids": [], "attention_mask": []}
    for number, (ids, labels) in enumerate(texts, 1):
        found["input_ids"] += ids
        found["labels"] += [*labels[1:], -100]
        found["position_ids"] += range(len(ids))
        found["attention_mask"] += [number] * len(ids)
    fill = {"input_ids": 0, "labels": -100, "position_ids": 0, "attention_mask": 0}
    return {name: values + [fill[name]] * (width - len(values)) for name, values in found.items()}


def test_shifted_labels_of_numbered_documents_are_trained_exactly(stand_ins) -> None:
    collater = import_module("nemo_automodel.components.datasets.utils").neat_packed_collater
    texts, model = documents_of(documents(6)), llama()
    before = weights_of(model)

    def collate(rows):
        batch = collater(rows, packing=CONTRACT)
        batch["shift_labels"] = batch.pop("labels")
        return batch

    batch = crosspack.with_boundaries(collate, crosspack.patch(model, verify=False))([row(texts[:3]), row(texts[3:])])
    labels = batch.pop("shift_labels")
    with pytest.raises(UnsupportedModelError, match="came with _packed_seq_ids, and LlamaForCausalLM is not known to"):
        model(**batch)
    del batch["_packed_seq_ids"]
    torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), labels.view(-1)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert worst_error(gradients, alone(model.config, before, texts))[0] < 1e-5
