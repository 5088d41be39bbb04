"""Deals the rows of a stream: to shards one by one, and a shard's rows to its workers by batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError
from packing_core.planning.pieces import integer
from packing_core.storage.arrays import Int64


@dataclass(frozen=True)
class Deal:
    """Row r belongs to shard r modulo ``shards``; batch b of a shard's rows to worker b modulo ``workers``.

    A reader that takes one batch from each worker in turn gets the shard's rows in their order. So the rows that have
    been taken are always the first ones, whatever the number of workers.

    Attributes:
        index, shards: the shard and how many there are.
        worker, workers: the worker of the shard, and how many there are.
        batch: rows of a batch.
        base: rows before this one were dealt in an earlier run.
        taken: rows of this worker that were taken since.
    """

    index: int
    shards: int
    worker: int = 0
    workers: int = 1
    batch: int = 1
    base: int = 0
    taken: int = 0

    @property
    def _first(self) -> int:
        """The first row of this shard."""
        return self.base + (self.index - self.base) % self.shards

    def mine(self, numbers: Int64) -> NDArray[np.bool_]:
        """Returns the rows among these that are this worker's and not taken yet."""
        mine: NDArray[np.bool_] = (numbers >= self.base) & (numbers % self.shards == self.index)
        mine &= self._own((numbers - self._first) // self.shards)
        return mine

    def pads(self, rows: int) -> bool:
        """Returns whether this worker ends with a row of padding, so that all shards of ``rows`` rows have as many."""
        left, real = -(-(rows - self.base) // self.shards), -(-(rows - self._first) // self.shards)
        return left > real and bool(self._own(np.array([real]))[0])

    def _own(self, places: Int64) -> NDArray[np.bool_]:
        """Returns the places among the shard's rows that are this worker's and not taken."""
        batch, inside = np.divmod(places, self.batch)
        turn, worker = np.divmod(batch, self.workers)
        own: NDArray[np.bool_] = (worker == self.worker) & (turn * self.batch + inside >= self.taken)
        return own

    def state(self, taken: int) -> dict[str, Any]:
        """Returns the finished rows of all shards for a shard with one worker, else the worker's own part."""
        if self.workers == 1:
            return {"rows": self.base + (self.taken + taken) * self.shards}
        return {"rows": self.base, "part": {**self._part, "taken": self.taken + taken}}

    @property
    def _part(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("worker", "workers", "batch", "shards")}

    def resumed(self, state: Mapping[str, Any]) -> Deal:
        """Restores a deal from a state.

        Raises:
            PackingError: it is of one of several workers, and this is not that one.
        """
        part, taken = state.get("part"), 0
        if part is not None:
            if {name: part.get(name) for name in self._part} != self._part or integer(part.get("taken")) is None:
                raise PackingError(
                    f"the state is of worker {part.get('worker')} of {part.get('workers')} with batches of "
                    f"{part.get('batch')} on {part.get('shards')} shards: join the states of all its workers by "
                    "crosspack.join_states, which gives one for any number of workers and shards"
                )
            taken = int(part["taken"])
        return replace(self, base=state["rows"], taken=taken)


def rows_done(parts: list[Mapping[str, Any]]) -> int:
    """Rows of a shard that its workers have given together, from their parts of the state.

    Raises:
        PackingError: a worker's part is missing, or there twice, or these are not the shard's first rows.
    """
    workers, batch = parts[0]["workers"], parts[0]["batch"]
    if sorted(part["worker"] for part in parts) != list(range(workers)):
        found = ", ".join(str(part["worker"]) for part in parts)
        raise PackingError(f"the states are of the workers {found} of {workers}: pass one of each")
    done: int = sum(part["taken"] for part in parts)
    for part in parts:
        place = np.arange(done)
        own = int(Deal(0, 1, part["worker"], workers, batch)._own(place).sum())
        if own != part["taken"]:
            raise PackingError(
                f"worker {part['worker']} gave {part['taken']} rows and would have given {own} of the first {done}: "
                "take batches from the workers in turn, of as many rows as the stream was told"
            )
    return done


def part_of(name: str, given: Any) -> tuple[int, int]:
    """``given`` as (index, count).

    Raises:
        PackingError: it is something else, or there is no such index.
    """
    try:
        index, count = map(integer, given)
    except (TypeError, ValueError):  # not two things
        index = count = None
    if index is None or count is None or not 0 <= index < count:
        raise PackingError(f"{name} is {given!r}: pass (index, count) with 0 <= index < count")
    return index, count
