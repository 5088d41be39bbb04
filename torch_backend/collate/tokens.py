"""Labels of tokens that no shift moves: those of token classifiers, and those of masked language models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import PackedBatch
from packing_core.batches.stored import IGNORE_INDEX

# A token classifier's labels travel as a column, so that first tokens keep theirs; 0 is what is not trained.
EVERY_LABEL = "_every_label"


def with_every_label(batch: PackedBatch) -> PackedBatch:
    """The batch with its labels, as they were given, in a column that is 0 where nothing is trained."""
    assert batch.labels is not None
    trained = batch.segment_ids != 0
    if batch.loss_mask is not None:
        trained = trained & batch.loss_mask
    every = np.where(trained, batch.labels.astype(np.int64) - IGNORE_INDEX, 0)
    return replace(batch, columns={**batch.columns, EVERY_LABEL: every})


def masked(masking: Any, ids: Tensor, padding: NDArray[np.bool_], special: Tensor | None = None) -> dict[str, Tensor]:
    """Tokens [B, S] of which some are hidden, and labels that are -100 at all others.

    Args:
        masking: transformers' collator for masked language models.
        ids: [B, S], padding: [B * S].
        special: [B, S], 1 at tokens that are never hidden; by default those that are special to the tokeniser.
    """
    if masking.seed is not None and masking.generator is None:
        masking.create_rng()
    if special is None:
        known = masking.tokenizer.get_special_tokens_mask
        special = torch.tensor([known(row, already_has_special_tokens=True) for row in ids.tolist()])
    kept = special.bool() | torch.from_numpy(padding).view_as(ids)
    hidden, labels = masking.torch_mask_tokens(ids.clone(), special_tokens_mask=kept)
    return {"input_ids": hidden, "labels": labels}
