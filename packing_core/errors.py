"""The one error hierarchy of Crosspack.

Every message says what is wrong, where, and the way out:
``document 17 has 9,214 tokens and capacity is 8,192: pass overflow="split" or "truncate", or raise capacity``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

_VALUE = r"""(?:=(True\b|[\d,]+|["']\w+["'](?:(?:, or |, | or )["']\w+["'])*))?"""


class PackingError(ValueError):
    """Bad input to any Crosspack function; the base of every error that Crosspack raises on purpose.

    Args:
        option: the keywords of the function that the message names, separated by spaces.
    """

    def __init__(self, *message: object, option: str = "") -> None:
        self.args = message  # as super().__init__ does, which torch.compile does not trace
        self.option = option

    def reworded(self, message: str) -> Self:
        """Returns the same error with another message that names the same keywords."""
        return type(self)(message, option=self.option)

    def with_names(self, option: Callable[[str, str], str]) -> str:
        """Returns the message with the keywords as a command line takes them.

        Args:
            option: takes a keyword and the value that the message has after it, ``""`` for none and for True; returns
                the option with its value.

        >>> error = PackingError('pass overflow="split" or "drop", or raise capacity', option="overflow capacity")
        >>> error.with_names(lambda keyword, value: f"--{keyword} {value}".rstrip())
        'pass --overflow split or drop, or raise --capacity'
        """
        if not self.option:
            return str(self)

        def named(match: re.Match[str]) -> str:
            value = re.sub("[\"']", "", match[2] or "True")
            return option(match[1], "" if value == "True" else value)

        return re.sub(rf"(?<![\w-])({'|'.join(self.option.split())})\b{_VALUE}", named, str(self))


class CapacityError(PackingError):
    """A document, a row or a segment count does not fit the stated limit."""


class LayoutError(PackingError):
    """Packed metadata (boundaries, segment ids, positions, shapes, dtypes) contradicts itself or the data."""


class UnsupportedError(PackingError):
    """An implementation was asked for something that it cannot do exactly; it never falls back."""


class UnsupportedModelError(UnsupportedError):
    """A model, or an option of it, cannot be trained packed without contamination."""


class ContaminationError(PackingError):
    """A measurement showed that one document changes another one's outputs or gradients."""


class RowIndexError(PackingError, IndexError):
    """A row or a sequence is asked for that does not exist."""


class KeywordError(PackingError, TypeError):
    """A function was given a keyword argument that it does not have; the message names the right one."""


class MissingExtraError(PackingError, ImportError):
    """An optional library is absent or too old; the message is one line that says what to install."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message, for one-line errors; with the next one where it ends in a colon."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    more = next((line.strip() for line in rest if line.strip()), "") if first.endswith(":") else ""
    return f"{first} {more}".strip()


@contextmanager
def naming(
    what: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    *,
    way_out: str = "",
    with_kind: bool = False,
    ours: bool = False,
) -> Iterator[None]:
    """Names an option or a file in what another library raises about it, which may be anything, in one line.

    Args:
        what: the option or the file, as its user wrote it; with a ``way_out``, what is wrong with it too.
        kinds: of errors; all others pass.
        with_kind: name the class of the error.
        ours: name it in errors of this project too, which pass otherwise: what raises them is a user's code.

    Raises:
        PackingError: in place of such an error.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, PackingError) and not ours:
            raise
        line = f"{type(error).__name__}: {first_line(error)}" if with_kind else first_line(error)
        raise PackingError(f"{what} ({line}): {way_out}" if way_out else f"{what}: {line}") from error


@contextmanager
def within_memory(what: str, way: str) -> Iterator[None]:
    """Turns a failed allocation into our error: NumPy raises ValueError where not even an address fits."""
    try:
        yield
    except MemoryError:
        raise CapacityError(f"{what} do not fit into memory: {way}") from None


def plural(number: int, noun: str) -> str:
    """The number with its noun, for messages.

    >>> plural(1, "row"), plural(2_000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
