"""The keys by which ``--order-by`` orders documents: a record and the name of a column in, a number or a text out."""

from __future__ import annotations

from typing import Any

from crosspack.encoding.kinds import Record, Where
from packing_core.errors import PackingError

Key = str | int | float


def key_of(where: Where, record: Record, column: str) -> Key:
    """Returns the key of a record.

    Raises:
        PackingError: the record has none that is a number or a text.
    """
    value: Any = record.get(column)
    if not isinstance(value, str | int | float) or value != value:
        what = f"has no {column}" if value is None else f"has {value!r} in {column}"
        raise PackingError(f"{where} {what}, by which --order-by orders: give every record a number or a text")
    return value
