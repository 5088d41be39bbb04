"""Packed rows as the train step and the decoder read them. Imports no framework."""

from __future__ import annotations

import numpy as np

from packing_core.batches.batch import PackedBatch
from packing_core.errors import LayoutError


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
