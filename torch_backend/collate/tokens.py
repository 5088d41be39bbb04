"""Unshifted labels of tokens, for token classifiers and masked language models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import PackedBatch
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError

# A token classifier's labels travel as a column, so that first tokens keep theirs; 0 is what is not trained.
EVERY_LABEL = "_every_label"


def every_label(batch: PackedBatch) -> NDArray[Any]:
    """The labels as they were given [R, capacity], first tokens' too, and -100 where nothing is trained."""
    assert batch.labels is not None
    trained = batch.segment_ids != 0
    if batch.loss_mask is not None:
        trained = trained & batch.loss_mask
    return np.where(trained, batch.labels, IGNORE_INDEX)


def with_every_label(batch: PackedBatch) -> PackedBatch:
    """The batch with its labels, as they were given, in a column that is 0 where nothing is trained."""
    every = every_label(batch).astype(np.int64) - IGNORE_INDEX
    return replace(batch, columns={**batch.columns, EVERY_LABEL: every})


def check_first_labels(ids: Any, labels: Any, starts: Any, *, way_out: str) -> None:
    """Raises if first labels would be lost that a token classifier or a masked language model trains.

    A model of the next token cannot train a document's first token, so a label there says nothing if it is the token
    itself. Another label belongs to a model that trains it.

    Args:
        ids, labels: of the tokens, -100 where nothing is trained.
        starts: bool, the first tokens of documents.
        way_out: how to say which model it is.

    Raises:
        LayoutError: a first token has a label that is not the token itself.
    """
    ids, labels, starts = (np.asarray(x).reshape(-1) for x in (ids, labels, starts))
    lost = np.flatnonzero(starts & (labels != ids) & (labels != IGNORE_INDEX))
    if len(lost):
        token, label = ids[lost[0]], labels[lost[0]]
        raise LayoutError(
            f"a document begins with the token {token}, whose label is {label}: token classifiers and masked language "
            f"models train this label, and no other model can: {way_out}"
        )


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
