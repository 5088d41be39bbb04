"""The keys by which ``--order-by`` orders documents: a record and the name of a column in, a number or a text out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

from crosspack.encoding.kinds import Record, Where
from packing_core.errors import PackingError

Key = str | int | float
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,2})?")


def key_of(where: Where, record: Record, column: str) -> Key:
    """Returns the key of a record.

    Raises:
        PackingError: the record has none that is a number or a text.
    """
    value: Any = record.get(column)
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    if isinstance(value, date):  # of Parquet and Arrow; datetimes are dates too
        return value.isoformat()
    if not isinstance(value, str | int | float) or value != value:
        what = f"has no {column}" if value is None else f"has {value!r} in {column}"
        raise PackingError(f"{where} {what}, by which --order-by orders: give every record a number or a text")
    return value


def as_numbers(keys: Sequence[Key]) -> list[Any]:
    """Returns keys that order as numbers do where all are texts of numbers, as those of a CSV are; else the keys.

    >>> sorted(as_numbers(["10", "9", "1e1"])), as_numbers(["10", "a"])
    ([9, 10, 10], ['10', 'a'])
    """
    if not all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in keys):
        return list(keys)
    return [int(key) if str(key).lstrip("+-").isdecimal() else float(key) for key in keys]
