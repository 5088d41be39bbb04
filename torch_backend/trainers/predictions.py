"""Figures of a trainer as they are without packing: predictions have a row for each document, and tokens are counted.

A packed batch and what the model makes of its rows [B, S, ...] -> the values of each document -> [documents, longest,
...], padded with -100 as transformers pads, in the order of the data. ``compute_metrics``, ``predict`` and
``preprocess_logits_for_metrics`` receive these, and so they do of inputs (``include_for_metrics``). A trainer that
generates in evaluation has no use for rows of several documents: its evaluation batches are those of the collator that
it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from torch_backend.hf.anatomy.heads import labels_documents


class DocumentPredictions:
    """Replaces ``prediction_step`` of a trainer. A classifier predicts by document already, and its inputs are rows."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.stock_prediction = trainer.prediction_step

    def __call__(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **options: Any,
    ) -> Any:
        """As ``Trainer.prediction_step``."""
        loss, logits, labels = self.stock_prediction(model, inputs, prediction_loss_only, ignore_keys, **options)
        if not labels_documents(self.trainer.model):
            logits, labels = by_document(logits, inputs), by_document(labels, inputs)
        if "inputs" in self.trainer.args.include_for_metrics:  # the loop reads them from the batch after this call
            inputs.update({name: by_document(value, inputs) for name, value in inputs.items()})
        return loss, logits, labels


def generates_in_evaluation(trainer: Any) -> bool:
    """Returns whether a trainer generates from the batches of its evaluation (transformers' ``Seq2SeqTrainer``)."""
    return bool(getattr(trainer.args, "predict_with_generate", False))


def evaluate_unpacked(trainer: Any, collator: Any) -> None:
    """Let a trainer evaluate and predict on batches of ``collator``."""
    for name in ("get_eval_dataloader", "get_test_dataloader"):
        setattr(trainer, name, partial(_dataloader_by, trainer, collator, getattr(trainer, name)))


def _dataloader_by(trainer: Any, collator: Any, make: Any, *args: Any, **options: Any) -> Any:
    ours, trainer.data_collator = trainer.data_collator, collator
    try:
        return make(*args, **options)
    finally:
        trainer.data_collator = ours


def predict_documents(trainer: Any) -> None:
    """Let a trainer's evaluation return what its model predicts, and what it read, by document; and count tokens."""
    trainer.prediction_step = DocumentPredictions(trainer)
    trainer._track_num_input_tokens = partial(_track_tokens, trainer._track_num_input_tokens)


def _track_tokens(track: Any, inputs: Any) -> None:
    """As ``Trainer._track_num_input_tokens``, which without a mask takes for padding what its tokenizer pads with."""
    packed = isinstance(inputs, Mapping) and inputs.get(BatchKey.LENGTHS) and inputs.get(BatchKey.DOCUMENTS)
    if packed and inputs.get("attention_mask") is None:
        lengths, documents = inputs[BatchKey.LENGTHS], inputs[BatchKey.DOCUMENTS]
        real = sum(lengths[segment] for segment in {segment for numbers in documents for segment in numbers})
        inputs = {**inputs, "attention_mask": torch.tensor(real)}  # of which the sum is taken
    track(inputs)


def by_document(values: Any, batch: Mapping[str, Any]) -> Any:
    """Tensors [B, S, ...], also inside tuples and mappings, as [documents, longest, ...]; all others as they are."""
    if isinstance(values, tuple | list):
        return type(values)(by_document(value, batch) for value in values)
    if isinstance(values, Mapping):
        return {name: by_document(value, batch) for name, value in values.items()}
    lengths, documents = batch.get(BatchKey.LENGTHS), batch.get(BatchKey.DOCUMENTS)
    if not isinstance(values, Tensor) or not documents or values.shape[:2] != batch["input_ids"].shape:
        return values
    segments = values.flatten(0, 1).split(lengths)
    whole = [torch.cat([segments[number] for number in numbers]) for numbers in documents]
    return pad_sequence(whole, batch_first=True, padding_value=IGNORE_INDEX)
