"""Predictions of an evaluation as they are without packing: a row for each document.

A packed batch and what the model makes of its rows [B, S, ...] -> the values of each document -> [documents, longest,
...], padded with -100 as transformers pads, in the order of the data. ``compute_metrics``, ``predict`` and
``preprocess_logits_for_metrics`` receive these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from packing_core.batches.stored import IGNORE_INDEX
from torch_backend.hf.anatomy.heads import labels_documents


class DocumentPredictions:
    """Replaces ``prediction_step`` of a trainer whose model predicts something for each token."""

    def __init__(self, trainer: Any) -> None:
        self.stock_prediction = trainer.prediction_step

    def __call__(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """As ``Trainer.prediction_step``."""
        loss, logits, labels = self.stock_prediction(model, inputs, prediction_loss_only, ignore_keys)
        return loss, by_document(logits, inputs), by_document(labels, inputs)


def predict_documents(trainer: Any) -> None:
    """Let a trainer's evaluation return what its model predicts by document; a classifier of documents does already."""
    if not (isinstance(trainer.prediction_step, DocumentPredictions) or labels_documents(trainer.model)):
        trainer.prediction_step = DocumentPredictions(trainer)


def by_document(values: Any, batch: Mapping[str, Any]) -> Any:
    """Tensors [B, S, ...], also inside tuples and mappings, as [documents, longest, ...]; all others as they are."""
    if isinstance(values, tuple | list):
        return type(values)(by_document(value, batch) for value in values)
    if isinstance(values, Mapping):
        return {name: by_document(value, batch) for name, value in values.items()}
    lengths, documents = batch.get("packed_lengths"), batch.get("packed_documents")
    if not isinstance(values, Tensor) or not documents or values.shape[:2] != batch["input_ids"].shape:
        return values
    segments = values.flatten(0, 1).split(lengths)
    whole = [torch.cat([segments[number] for number in numbers]) for numbers in documents]
    return pad_sequence(whole, batch_first=True, padding_value=IGNORE_INDEX)
