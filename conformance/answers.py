"""The form of an answer, before any number of it is compared: what the protocol says that a method returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packing_core.protocol import Batch

NAMED = "gradients by name"
_USUAL = ("an output", NAMED)
_PARTS = {
    "loss": ("a loss sum", "a weight sum", "the gradient of the logits"),
    "shared_gradients": ("a mean loss", NAMED, "the number of tokens"),
    "context_gradients": ("a mean loss", NAMED, "the number of tokens of each rank"),
    "train": ("losses", "weights by name"),
}


def malformed(method: str, answer: Any) -> str | None:
    """Explains how the form of an answer differs from what the method returns; None if it does not."""
    if method == "plan":
        rows = isinstance(answer, Sequence) and all(_is_numeric(row) and np.ndim(row) == 1 for row in answer)
        return None if rows else f"{_kind(answer)}, not a list of document numbers for each row"
    if method == "collate":
        return _malformed_batch(answer)
    if method == "forward":
        return None if _is_numeric(answer) else f"{_kind(answer)}, not an array of logits"
    parts = _PARTS.get(method, _USUAL)
    if not isinstance(answer, tuple | list) or len(answer) != len(parts):
        return f"{_kind(answer)}, not ({', '.join(parts)})"
    for part, x in zip(parts, answer, strict=True):
        if part.endswith("by name"):
            if not isinstance(x, Mapping):
                return f"{_kind(x)} in place of {part}"
            wrong = [name for name, y in x.items() if not _is_numeric(y)]
            if wrong:
                return f"{_kind(x[wrong[0]])} in place of an array for {wrong[0]}"
        elif not _is_numeric(x):
            return f"{_kind(x)} in place of {part}"
    return None


def _malformed_batch(batch: Any) -> str | None:
    if not isinstance(batch, Batch):
        return f"{_kind(batch)}, not a packing_core.protocol.Batch"
    arrays = {name: x for name, x in vars(batch).items() if name != "native"}
    shape = np.shape(batch.input_ids)
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu":
            return f"{_kind(x)} for {name}, not a numpy array of integers"
        if x.ndim != 2 or x.shape != shape:
            return f"{name} of shape {x.shape} beside input_ids of shape {shape}: all four are [rows, tokens]"
    return None


def _is_numeric(x: Any) -> bool:
    """Returns whether numpy makes an array of numbers of it."""
    if x is None:
        return False
    try:
        np.asarray(x, np.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _kind(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return f"an array of {x.dtype} {x.shape}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else f"a {type(x).__name__}"
