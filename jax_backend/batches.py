"""Packed rows as the train step and the decoder read them. Imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packing_core.batches.batch import PackedBatch
from packing_core.errors import LayoutError

# what GrainSource and GrainStream call the arrays, and MaxText
_CONVENTIONS = (
    {"input_ids": "inputs", "segment_ids": "inputs_segment_ids", "position_ids": "inputs_positions"},
    {"input_ids": "inputs", "segment_ids": "inputs_segmentation", "position_ids": "inputs_position"},
)


def renamed(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a batch under the names of :func:`to_batch`, where it has those of grain or MaxText."""
    for names in _CONVENTIONS:
        if "input_ids" not in batch and all(name in batch for name in names.values()):
            batch = {**batch, **{name: batch[foreign] for name, foreign in names.items()}}
            if "loss_weights" not in batch and "targets_segmentation" in batch:
                batch["loss_weights"] = (batch["targets_segmentation"] != 0).astype(np.float32)
    return batch


def to_batch(packed: PackedBatch) -> dict[str, np.ndarray]:
    """Makes what :class:`~jax_backend.training.train_step.TrainStep` and the decoder take, [R, capacity] each.

    ``targets`` are shifted: the target at token t is token t + 1 of the same segment; where ``loss_weights`` is 0 (a
    segment's last token, padding, masked prompts) nothing is trained. ``document_ids`` number the documents of the
    batch in source order, -1 in padding, and ``document_positions`` the tokens of each document, also where it was
    split; :func:`jax_backend.reduce` reads them. Both are left out if a document is in the batch twice.
    """
    shifted = packed.to_dict("grain")
    try:
        documents = {"document_ids": packed.document_ids, "document_positions": packed.document_positions}
    except LayoutError:
        documents = {}
    return {
        "input_ids": shifted["inputs"],
        "segment_ids": shifted["inputs_segment_ids"],
        "position_ids": shifted["inputs_positions"],
        "targets": shifted["targets"],
        "loss_weights": shifted["loss_weights"],
        **documents,
    }
