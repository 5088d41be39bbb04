"""Labels and other numbers that belong to whole documents.

Examples with a scalar label or a vector of them -> :func:`take_numbers` -> ``PackedBatch.per_document`` ->
:func:`in_order`, one entry for each document in the order of their numbers (source order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import PackedBatch
from packing_core.batches.columns import PROMPT
from packing_core.errors import LayoutError

LABELS = "labels"
NAMES = (LABELS, "label", "label_ids")  # of a column of labels, as transformers' collators read them


def take_numbers(examples: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """The columns of examples that have a value per token, and the others: labels [N] or [N, C], and numbers [N].

    Raises:
        LayoutError: some examples have labels or a number and others have none, or labels differ in shape.
    """
    numbers = {name: None for example in examples for name, x in example.items() if _is_number(name, x)}
    found = {}
    for name, names in {LABELS: NAMES, **{name: (name,) for name in numbers}}.items():
        values = [next((x[one] for one in names if x.get(one) is not None), None) for x in examples]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            missing = next(number for number, value in enumerate(values) if value is None)
            word = "label" if name == LABELS else name
            raise LayoutError(f"example {missing} has no {word} and others have: give one to all of them or to none")
        found[name] = as_labels([np.asarray(value) for value in values])
    taken = {*NAMES, *numbers}
    return [{name: x for name, x in example.items() if name not in taken} for example in examples], found


def _is_number(name: str, value: Any) -> bool:
    """Returns whether a column has one value per document, beside its label."""
    single = isinstance(value, int | float) or (
        getattr(value, "ndim", None) == 0 and np.asarray(value).dtype.kind in "biuf"
    )
    return name not in (*NAMES, PROMPT) and single


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
            'overflow="error", "truncate" or "drop"',
            option="overflow",
        )


def in_order(batch: PackedBatch) -> dict[str, Tensor]:
    """[documents] or [documents, C]: the labels and numbers of a batch in source order."""
    order = np.argsort(batch.sources, kind="stable")
    return {name: torch.from_numpy(as_labels(values)[order]) for name, values in batch.per_document.items()}
