"""Tells by its description whether ``pack_dataset`` made a data set, whose rows need the lengths of their documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packing_core.batches.marks import MARKS
from packing_core.errors import LayoutError

PACKED_DESCRIPTION = "Rows packed by crosspack.pack_dataset; seq_lengths are the lengths of their documents."
LOST_LENGTHS = (
    "came packed from crosspack.pack_dataset, and its seq_lengths were dropped, so that its documents would run as "
    "one: keep the column (select_columns, remove_columns, with_format and a collator can drop it), and let "
    "crosspack.PackedCollator(model) or crosspack.enable_packing(trainer) read it. If the data set holds documents "
    "again, say so: dataset.info.description = ''"
)
_MARKS = [name for name in MARKS if name != "attention_mask"]


def is_packed_dataset(data: Any) -> bool:
    """Returns whether ``pack_dataset`` made a data set, or what it was made of by ``datasets``, in any process."""
    return PACKED_DESCRIPTION in (getattr(getattr(data, "info", None), "description", None) or "")


def refuse_lost_lengths(examples: Iterable[Any], place: str, data: Any) -> None:
    """Raises for examples of a data set that are rows of ``pack_dataset`` without the lengths of their documents.

    Args:
        examples: mappings with ``input_ids``; others are not looked at.
        place: what holds them, for the error.
        data: the data set that they are from.

    Raises:
        LayoutError: the first such example.
    """
    for number, example in enumerate(examples) if is_packed_dataset(data) else ():
        tokens = isinstance(example, Mapping) and example.get("input_ids") is not None
        if tokens and all(example.get(name) is None for name in _MARKS):
            raise LayoutError(f"{place} {number} {LOST_LENGTHS}")
