"""Fair timing of contenders on a machine that may be busy: they take steps in turn, each timed by a clock."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

Name = TypeVar("Name")
Outcome = TypeVar("Outcome")


class Clock:
    """Wall time of steps, and how much of the processor time that ``threads`` threads could have had they got.

    A share far below 1 on a CPU says that something else was running, so times say little.
    """

    def __init__(self, threads: int) -> None:
        self.seconds = 0.0
        self._threads = threads
        self._wall = self._processor = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the block; ``seconds`` is its wall time then."""
        begin, processor = time.perf_counter(), time.process_time()
        yield
        self.seconds = time.perf_counter() - begin
        self._wall += self.seconds
        self._processor += time.process_time() - processor

    @property
    def cpu(self) -> float | None:
        """Processor time over wall time times threads, of all blocks; None before the first."""
        return self._processor / (self._wall * self._threads) if self._wall else None


def in_turn(contenders: Mapping[Name, Generator[None, None, Outcome]]) -> dict[Name, Outcome]:
    """Advance every contender to its next ``yield``, again and again, and return what each returns.

    Contenders that are timed step by step meet the same other load on the machine this way. The order is reversed from
    round to round, so none always follows the same other one.
    """
    outcomes: dict[Name, Outcome] = {}
    waiting = list(contenders)
    while waiting:
        for name in list(waiting):
            try:
                next(contenders[name])
            except StopIteration as end:
                outcomes[name] = end.value
                waiting.remove(name)
        waiting.reverse()
    return {name: outcomes[name] for name in contenders}
