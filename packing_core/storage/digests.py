"""Digests of documents, by which a saved state knows the data that it was taken of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from packing_core.storage.arrays import as_array

SAMPLED = 256


def sampled(count: int) -> list[int]:
    """Numbers of at most 256 of ``count`` documents, evenly spaced from the first to the last.

    Their contents tell data that were exchanged or shuffled from the same ones.
    """
    numbers: list[int] = np.unique(np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64)).tolist()
    return numbers


def digest(documents: Iterable[tuple[int, int, Any]]) -> str:
    """Digests pieces (document number, first token, content): the same for lists and arrays of the same numbers."""
    hashed = blake2b(digest_size=16)
    for number, start, content in documents:
        columns = content if isinstance(content, Mapping) else {"input_ids": content}
        for name in sorted(columns, key=str):
            array = as_array(columns[name], f"{name} of document {number}")
            wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
            hashed.update(f"{number} {start} {name} {wide.shape} {wide.dtype}".encode())
            hashed.update(wide.tobytes())
    return hashed.hexdigest()
