"""Reading for a stream: documents in until the buffer is full, pieces that no row has taken yet out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np

from packing_core.batches.stored import WEIGHTINGS, Weighting
from packing_core.errors import PackingError
from packing_core.planning.cost import checked_cost
from packing_core.planning.pieces import check_seed, choice, integer, positive
from packing_core.planning.rule import RowRule
from packing_core.streaming.pending import Pending, Piece, Read, cut, length_of
from packing_core.streaming.sources import Source

REMEMBERED = 2**16  # numbers of documents that a stream lists as truncated or dropped


StreamStrategy = Literal["mixed", "best_fit"]


@dataclass(frozen=True)
class StreamOptions:
    """The options of :func:`packing_core.stream`; ``checked`` makes them.

    ``keys`` identifies the keys and weights of the rule's order. ``equal_cost`` is the number of shards whose rows of a
    step cost the same, 0 for rows in any order.
    """

    rule: RowRule
    buffer: int = 8192
    buffer_tokens: int = 0
    max_age: int = 0
    seed: int | None = None
    pad_id: int = 0
    weighting: Weighting = "token"
    keys: str | None = None
    equal_cost: int = 0

    @staticmethod
    def checked(rule: RowRule, **given: Any) -> StreamOptions:
        """Checks the options of :func:`packing_core.stream`, and fills in those that depend on others.

        Raises:
            PackingError: one of them is out of range, or two contradict each other.
        """
        choice("strategy", rule.strategy, get_args(StreamStrategy))
        buffer = positive("buffer", given["buffer"])
        defaults = {"max_age": 16 * buffer, "buffer_tokens": max(2**24, 64 * rule.capacity)}
        for name, default in defaults.items():
            given[name] = default if given[name] is None else positive(name, given[name])
        if given["max_age"] < buffer:
            age = given["max_age"]
            raise PackingError(f"max_age is {age:,} and buffer {buffer:,}: pass an age of at least one buffer")
        if (pad_id := integer(given["pad_id"])) is None:
            raise PackingError(f"pad_id is {given['pad_id']!r}: pass an integer")
        choice("weighting", given["weighting"], WEIGHTINGS)
        return StreamOptions(rule, **given | {"buffer": buffer, "seed": check_seed(given["seed"]), "pad_id": pad_id})

    def state(self) -> dict[str, Any]:
        """Returns the options that a state holds: those of the order, and of equal cost, only where there is one."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "rule"}
        limits = {name: getattr(self.rule, name) for name in ("capacity", "overflow", "min_piece", "max_segments")}
        state = limits | own | {"context": self.rule.context_tokens, "strategy": self.rule.strategy, "alignment": 1}
        if self.rule.order == "random":
            del state["keys"]
        else:
            state["order"] = self.rule.order
        if self.equal_cost:
            state["cost"] = repr(checked_cost(self.rule.cost))
        else:
            del state["equal_cost"]
        return state


class Reader:
    """Reads a source document by document, under the limits of a stream; see :func:`packing_core.stream`.

    Attributes:
        pending: pieces that were read and that no row has taken.
        cursor: number of the next document.
        last: the last document that was read.
        exhausted: whether the source is at its end.
        truncated, dropped, n_truncated, n_dropped: see :class:`packing_core.PackStream`.
    """

    pending: Pending
    cursor: int
    last: Any
    exhausted: bool

    def __init__(self, source: Source, options: StreamOptions) -> None:
        self.source, self.options, self.rule = source, options, options.rule
        self.truncated: deque[int] = deque(maxlen=REMEMBERED)
        self.dropped: deque[int] = deque(maxlen=REMEMBERED)
        self.n_truncated = self.n_dropped = 0
        self.restart()

    def restart(self, epoch: int = 0) -> None:
        """Go back to the first document of an epoch."""
        self.source.start_epoch(epoch)
        self.go_on(0, Pending.of([]), None, None)

    def go_on(self, cursor: int, pending: Pending, last: Any, opened: Iterator[Any] | None) -> None:
        """Go on at a document, with what is pending there."""
        self.cursor, self.pending, self.last, self._opened = cursor, pending, last, opened
        self.exhausted = False

    def fill(self) -> None:
        """Read until the buffer is full, the oldest pending document is as old as may be, or the source ends.

        When to stop is decided document by document, so it does not depend on where an earlier attempt broke off.
        """
        if self._opened is None:
            self._opened = self.source.open(self.cursor)
        held, tokens = len(self.pending.ids), int(self.pending.lengths.sum())
        last_number = int(self.pending.ids.min()) + self.options.max_age if held else None
        read = Read(self.cursor, [], [], {})
        documents, lengths, array = read.documents, read.lengths, np.ndarray  # locals are read faster
        capacity, buffer, most_tokens = self.rule.capacity, self.options.buffer, self.options.buffer_tokens
        try:
            while tokens < most_tokens and not self.exhausted:
                number = read.end
                room = buffer - held if last_number is None else min(buffer - held, last_number - number)
                if room <= 0:
                    break
                for document in islice(self._opened, room):  # a document is read when it is in ``documents``
                    kind = type(document)
                    try:  # the usual kinds, in less time; an array without dimensions has no length
                        length = len(document) if kind is array or kind is list else self._length(document, read.end)
                    except TypeError:
                        length = self._length(document, read.end)
                    if 0 < length <= capacity:
                        lengths.append(length)
                        documents.append(document)
                        tokens += length
                        if tokens < most_tokens:
                            continue
                    else:
                        pieces = self.cut(read.end, document)
                        read.cut[len(documents)] = pieces
                        lengths.append(length)
                        documents.append(document)
                        tokens += sum(piece[2] for piece in pieces)
                        held += len(pieces) - 1
                    break
                else:
                    self.exhausted = read.end < number + room
                held += read.end - number
                if held and last_number is None:
                    last_number = number + self.options.max_age
        except BaseException:
            self._opened = None  # an iterator that raised is at its end: open the source again
            raise
        finally:
            if documents:
                self.last = documents[-1]
            self.pending, self.cursor = self.pending.and_then(read.pending()), read.end

    def _length(self, document: Any, place: int) -> int:
        return length_of(document, self._number(place))

    def _number(self, place: int) -> int:
        return int(self.source.numbers(np.array([place]))[0])

    def cut(self, place: int, document: Any) -> list[Piece]:
        """Cuts the document at a place of the source into pieces by the rule; notes the tokens lost."""
        number = self._number(place)
        length = length_of(document, number)
        pieces = [(place, *piece[1:]) for piece in cut(number, document, length, self.rule)]
        if not pieces:
            self.dropped.append(number)
            self.n_dropped += 1
        elif length > self.rule.capacity and len(pieces) == 1:
            self.truncated.append(number)
            self.n_truncated += 1
        return pieces
