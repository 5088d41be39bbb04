"""Labels that belong to whole documents.

Examples with a scalar label or a vector of them -> :func:`take_labels` -> ``PackedBatch.per_document`` ->
:func:`labels_in_order`, one entry for each document in the order of their numbers (source order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import PackedBatch
from packing_core.errors import LayoutError

LABELS = "labels"
NAMES = (LABELS, "label", "label_ids")  # of a column of labels, as transformers' collators read them


def take_labels(examples: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], NDArray[Any] | None]:
    """The examples without their labels, and the labels [N] or [N, C]; None if there are none.

    Raises:
        LayoutError: some examples have labels and others have none, or they differ in shape.
    """
    kept = [{name: x for name, x in example.items() if name not in NAMES} for example in examples]
    found = [next((x[name] for name in NAMES if x.get(name) is not None), None) for x in examples]
    if all(label is None for label in found):
        return kept, None
    if any(label is None for label in found):
        missing = next(number for number, label in enumerate(found) if label is None)
        raise LayoutError(f"example {missing} has no label and others have: give one to all of them or to none")
    return kept, as_labels([np.asarray(label) for label in found])


def as_labels(given: Any) -> NDArray[Any]:
    """Labels as int64 or float32 [N] or [N, C].

    Raises:
        LayoutError: documents have labels of different shapes, such as one per token.
    """
    try:
        labels = np.asarray(given)
        if labels.dtype.kind not in "biuf":
            labels = np.stack([np.asarray(each) for each in labels.tolist()])
    except (TypeError, ValueError):
        labels = np.zeros((0, 0, 0))
    if labels.ndim not in (1, 2) or labels.dtype.kind not in "biuf":
        raise LayoutError(
            "this model classifies documents, so each takes a label or a vector of labels of one length; labels per "
            "token belong to token classification"
        )
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)


def check_whole(batch: PackedBatch) -> None:
    """Raise if a segment is no whole document.

    Raises:
        LayoutError
    """
    if batch.starts.any():
        document = batch.sources[np.flatnonzero(batch.starts)[0]]
        raise LayoutError(
            f"document {document} is split, and this model classifies whole documents: pack them with "
            'overflow="error", "truncate" or "drop"'
        )


def labels_in_order(batch: PackedBatch) -> Tensor | None:
    """[documents] or [documents, C]: the labels of a batch in source order, None if it has none."""
    values = batch.per_document.get(LABELS)
    return None if values is None else torch.from_numpy(as_labels(values)[np.argsort(batch.sources, kind="stable")])
