"""Packed rows as the train step and the decoder read them. Imports no framework."""

from __future__ import annotations

import numpy as np

from packing_core.batch import PackedBatch


def to_batch(packed: PackedBatch) -> dict[str, np.ndarray]:
    """What :class:`~jax_backend.train_step.TrainStep` and the decoder take, [R, capacity] each.

    ``targets`` are shifted: the target at token t is token t + 1 of the same segment; where ``loss_weights`` is 0 (a
    segment's last token, padding, masked prompts) nothing is trained.
    """
    shifted = packed.to_dict("grain")
    return {
        "input_ids": shifted["inputs"],
        "segment_ids": shifted["inputs_segment_ids"],
        "position_ids": shifted["inputs_positions"],
        "targets": shifted["targets"],
        "loss_weights": shifted["loss_weights"],
    }
