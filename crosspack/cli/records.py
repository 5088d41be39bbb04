"""``--data`` to records: what ``crosspack.read`` gives, with the option's name in its errors."""

from __future__ import annotations

from collections.abc import Iterable

from crosspack.reading import Records, read
from packing_core.errors import PackingError


def open_records(data: str | None, *, split: str = "train", columns: Iterable[str] = ()) -> Records:
    """Open ``data``, as :func:`crosspack.read` does.

    Raises:
        PackingError: it cannot be opened; the error names the option.
    """
    try:
        return read(data, split=split, columns=columns)
    except PackingError as error:
        raise type(error)(f"--data {error}") from error
