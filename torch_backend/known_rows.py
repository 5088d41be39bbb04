"""Recognises rows of ``pack_dataset`` by their tokens, where their lengths were left out.

They are lists of a data set, so their tokens cannot know that they are packed, as those of a collator's batch do
(:mod:`.packed_tokens`). They are remembered by their beginning up to some tokens of the second document, because they
may be padded, joined or cut on their way to a model, and are recognised wherever a row or a segment starts with it.
Fingerprints are integers that are the same on every device. Two things are not recognised: a part of a row that lacks
its beginning, and rows that another process packed. A data set also says in its description that it is packed
(:func:`is_packed_dataset`), in any process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.batches.marks import MARKS
from packing_core.errors import LayoutError
from packing_core.storage.segment_indexing import Int64, ranges
from torch_backend.segments import to_device

_BEGINNINGS = 1 << 16
_SHORTEST, _INSIDE = 8, 16  # tokens of a beginning, and those of them that lie behind the first document
_ODD = 0x1E3779B97F4A7C15
ROWS_OF_DATASET = 4096  # that are remembered, evenly spread
PACKED_DESCRIPTION = "Rows packed by crosspack.pack_dataset; seq_lengths are the lengths of their documents."
LOST_LENGTHS = (
    "came packed from crosspack.pack_dataset, and its seq_lengths were dropped, so that its documents would run as "
    "one: keep the column (select_columns, remove_columns, with_format and a collator can drop it), and let "
    "crosspack.PackedCollator(model) or crosspack.enable_packing(trainer) read it"
)
DOCUMENTS_AGAIN = "If the data set holds documents again, say so: dataset.info.description = ''"
_MARKS = [name for name in MARKS if name != "attention_mask"]
_beginnings: deque[int] = deque(maxlen=_BEGINNINGS)
_sorted: dict[torch.device, Tensor] = {}  # the beginnings, by the devices on which they were looked for


def _terms(ids: Any, positions: Any) -> Any:
    """Each token's part of the fingerprint of its row; int64 tensors or arrays, which wrap around."""
    places = (positions + 1) * _ODD
    places = (places ^ (places >> 29)) * _ODD
    return places * (ids + 1)


def remember_beginnings(ids: Int64, starts: Int64, lengths: Int64, first: Int64) -> None:
    """Remembers how packed rows begin, with their first token and without it, as loops that shift tokens do.

    Args:
        ids: flat tokens that hold the rows.
        starts, lengths: of the rows, by tokens.
        first: the lengths of their first documents.
    """
    counts = np.minimum(lengths, first + _INSIDE)
    kept = (first < lengths) & (counts >= _SHORTEST)
    starts, counts, first = starts[kept], counts[kept], first[kept]
    if not len(counts):
        return
    positions, ends = ranges(counts), np.cumsum(counts)
    tokens = ids[np.repeat(starts, counts) + positions].astype(np.int64)
    changes = np.append(0, tokens[1:] != tokens[:-1])
    found = []
    for skipped in (0, 1):
        terms = np.where(positions >= skipped, _terms(tokens, positions - skipped), 0)
        varied = np.add.reduceat(np.where(positions > 0, changes, 0), ends - counts) > 1
        found.append(np.add.reduceat(terms, ends - counts)[varied & (first > skipped)])
    _beginnings.extend(np.concatenate(found).tolist())
    _sorted.clear()


def forget() -> None:
    """Forgets all rows."""
    _beginnings.clear()
    _sorted.clear()


def knows_beginnings() -> bool:
    """Returns whether rows of ``pack_dataset`` are known in this process."""
    return len(_beginnings) > 0


def begins_packed(ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """bool [B, S]: the token at which what a row or segment holds so far is the beginning of a packed row.

    Args:
        ids: [B, S].
        positions: int [B, S], counting from 0 in each segment; None where each row is one.
    """
    if (known := _sorted.get(ids.device)) is None:
        known = _sorted[ids.device] = to_device(torch.tensor(sorted(_beginnings)), ids.device)
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    terms = _terms(ids.long(), positions).flatten()
    through = terms.cumsum(0)
    starts = torch.arange(len(terms), device=ids.device) - positions.flatten()
    found = through - (through - terms).index_select(0, starts)
    at = torch.searchsorted(known, found).clamp(max=len(known) - 1)
    return (known.index_select(0, at) == found).view(ids.shape)


def is_packed_dataset(data: Any) -> bool:
    """Returns whether ``pack_dataset`` made a data set, or what it was made of by ``datasets``."""
    return PACKED_DESCRIPTION in (getattr(getattr(data, "info", None), "description", None) or "")


def refuse_lost_lengths(examples: Iterable[Any], place: str, data: Any = None) -> None:
    """Raises for examples that are rows of ``pack_dataset`` without the lengths of their documents.

    Args:
        examples: mappings with ``input_ids`` on the host; others are not looked at.
        place: what holds them, for the error.
        data: the data set that they are from.

    Raises:
        LayoutError: the first such example.
    """
    packed = is_packed_dataset(data)
    if not (packed or knows_beginnings()):
        return
    for number, example in enumerate(examples):
        if not isinstance(example, Mapping) or example.get("input_ids") is None:
            continue
        if any(example.get(name) is not None for name in _MARKS):
            continue
        ids = torch.as_tensor(np.asarray(example["input_ids"], np.int64)).reshape(1, -1)
        if knows_beginnings() and bool(begins_packed(ids).any()):
            raise LayoutError(f"{place} {number} {LOST_LENGTHS}")
        if packed:
            raise LayoutError(f"{place} {number} {LOST_LENGTHS}. {DOCUMENTS_AGAIN}")
