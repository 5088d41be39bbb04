"""The state from which a stream resumes: counters, the numbers of pending documents, and a fingerprint of all of it.

The fingerprint covers the counters and the content of the pending documents and of the last one that was read; of a
sequence the state also holds a digest of documents from all over it. A state that was changed, and a source that gives
other documents, are found out before a row is made. Whose rows the next ones are, a `Deal` says: rows go to shards one
by one, and a shard's rows to its workers by batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError
from packing_core.planning.pieces import integer
from packing_core.storage.arrays import Int64, digest
from packing_core.streaming.pending import Pending, Piece, read_now
from packing_core.streaming.sources import Source


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
        named = ", ".join(str(part["worker"]) for part in parts)
        raise PackingError(f"the states are of the workers {named} of {workers}: pass one of each")
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


def part_of(name: str, part: Any) -> tuple[int, int]:
    """``part`` as (index, count).

    Raises:
        PackingError: it is something else, or there is no such index.
    """
    try:
        index, count = map(integer, part)
    except (TypeError, ValueError):  # not two things
        index = count = None
    if index is None or count is None or not 0 <= index < count:
        raise PackingError(f"{name} is {part!r}: pass (index, count) with 0 <= index < count")
    return index, count


COUNTERS = ("epoch", "rows", "round", "rows_before", "cursor")


@dataclass(frozen=True)
class Mark:
    """Start of a round: rows of all shards before it, documents read, those pending, and the last one read."""

    round: int
    rows_before: int
    cursor: int
    pending: Pending
    last: Any

    def places(self) -> list[list[int]]:
        """Document and first token of each pending piece."""
        both: list[list[int]] = np.stack([self.pending.ids, self.pending.starts], axis=1).tolist()
        return both

    def digest(self) -> str:
        """Fingerprints the documents."""
        numbers, starts = self.pending.ids.tolist(), self.pending.starts.tolist()
        pieces = [*zip(numbers, starts, self.pending.contents, strict=True)]
        pieces += [(self.cursor - 1, -1, self.last)] if self.cursor else []
        return digest((number, start, *read_now([content])) for number, start, content in pieces)


def sealed(state: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """The state with the digest of its documents, and a fingerprint of all of it."""
    state = {**state, "documents": digest}
    text = repr([(name, _plain(state[name])) for name in sorted(state) if name != "fingerprint"])
    return {**state, "fingerprint": blake2b(text.encode(), digest_size=16).hexdigest()}


def _plain(value: Any) -> Any:
    return sorted(value.items()) if isinstance(value, Mapping) else value


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of the states of all workers of a shard, which loads onto any number of workers and shards.

    Args:
        states: what ``state_dict()`` returned in each worker, in any order, after batches were taken from the workers
            in turn, as a DataLoader takes them. Other shards must have taken as many rows.

    Raises:
        PackingError: a worker's state is missing or was changed, they are of different runs, or the rows that were
            taken are not the shard's first ones.
    """
    states = list(states)
    if not states:
        raise PackingError("there are no states: pass what state_dict() returned in each worker")
    for state in states:
        if not isinstance(state, Mapping) or "documents" not in state or "fingerprint" not in state:
            raise PackingError("a state is none of a stream: pass what state_dict() returned in each worker")
        if sealed(state, state["documents"])["fingerprint"] != state["fingerprint"]:
            raise PackingError(
                "the fingerprint of a state does not match, because it was changed: pass it as state_dict() returned it"
            )
    if len(states) == 1 and "part" not in states[0]:
        return dict(states[0])
    moving = ("part", "documents", "fingerprint", "round", "rows_before", "cursor", "pending")
    runs = [
        {name: value for name, value in state.items() if name not in moving}
        | {name: state.get("part", {}).get(name) for name in ("workers", "batch", "shards")}
        for state in states
    ]
    if any(run != runs[0] for run in runs):
        differs = next(name for run in runs for name in run if run[name] != runs[0].get(name))
        raise PackingError(f"the states are of different runs, they differ in {differs}: pass those of one")
    done = rows_done([state["part"] for state in states])
    latest = max(states, key=lambda state: state["rows_before"])
    rows = latest["rows"] + done * latest["part"]["shards"]
    joined = {name: value for name, value in latest.items() if name not in ("part", "fingerprint")}
    return sealed({**joined, "rows": rows}, latest["documents"])


def read_state(state: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The state in plain Python numbers, checked as far as that can be done without its documents.

    Raises:
        PackingError: it is none, is of other options, or its numbers make no sense.
    """
    if not isinstance(state, Mapping):
        raise PackingError(f"the state is a {type(state).__name__}: pass what state_dict() of a stream returned")
    for name in (*options, *COUNTERS, "pending", "documents", "fingerprint"):
        if name not in state:
            raise PackingError(f"the state has no {name!r}: pass what state_dict() of a stream returned")
    for name, own in options.items():
        given = state[name] if own is None or isinstance(own, str) else integer(state[name])
        if type(given) is not type(own) or given != own:
            raise PackingError(
                f"the state was taken with {name}={state[name]} and this stream has {name}={own}: build it with the "
                f"options that it had"
            )
    counters = {name: _count(name, state[name]) for name in COUNTERS}
    try:
        pending = [[_count("pending", number) for number in place] for place in state["pending"]]
        well_formed = all(len(place) == 2 and place[0] < counters["cursor"] for place in pending)
    except TypeError:
        well_formed = False
    part = state.get("part")
    if not well_formed or (part is None and counters["rows"] < counters["rows_before"]):
        raise PackingError(
            "the numbers of the state contradict each other: pass what state_dict() of a stream returned"
        )
    given = {} if part is None else {"part": part}
    if "source" in state:
        given["source"] = _sample(state["source"])
    return {**options, **counters, **given, "pending": pending, "fingerprint": state["fingerprint"]}


def restore(
    given: Mapping[str, Any], source: Source, cut: Callable[[int, Any], list[Piece]]
) -> tuple[Mark, Iterator[Any]]:
    """Reads the pending documents of a state again.

    Args:
        given: what :func:`read_state` returned.
        cut: the pieces of the document at a place of the source.

    Returns:
        where the state's round begins, and the documents after those that were read before it.

    Raises:
        PackingError: the source has fewer documents than it had, or others.
    """
    cursor, places = given["cursor"], [(number, start) for number, start in given["pending"]]
    wanted = {number for number, _ in places}
    first = min([*wanted, max(cursor - 1, 0)])  # the last document that was read is in the fingerprint
    opened = source.open(first)
    found: dict[tuple[int, int], Piece] = {}
    number, last = first - 1, None
    for number, last in enumerate(islice(opened, cursor - first), first):
        if number in wanted:
            found |= {piece[:2]: piece for piece in cut(number, last)}
    lost = [document for document, start in places if (document, start) not in found]
    if lost or number < cursor - 1:
        which = f"document {lost[0]} was pending" if lost else f"{cursor:,} documents were read"
        raise PackingError(f"{which} and the source ends before it: give the source that it had")
    mark = Mark(given["round"], given["rows_before"], cursor, Pending.of([found[place] for place in places]), last)
    if sealed(given, mark.digest())["fingerprint"] != given["fingerprint"]:
        raise PackingError(
            "the fingerprint of the state does not match: the state was changed, or the source gives other "
            "documents than it did; give the stream the state and the source that it had"
        )
    if "source" in given and source.is_sequence and source.sample(given["source"][0]) != given["source"]:
        raise PackingError(
            "the source holds other documents than the one that the state was taken of, or in another order: give the "
            "stream the source that it had"
        )
    return mark, opened


def _sample(value: Any) -> list[Any]:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str):
        return [_count("source", value[0]), value[1]]
    raise PackingError(f"source of the state is {value!r}: pass what state_dict() of a stream returned")


def _count(name: str, value: Any) -> int:
    number = integer(value)
    if number is None or number < 0:
        raise PackingError(
            f"{name} of the state is {value!r}: it counts from 0, pass what state_dict() of a stream returned"
        )
    return number
