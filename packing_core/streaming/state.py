"""The state from which a stream resumes: counters, the numbers of pending documents, and a fingerprint of all of it.

The fingerprint covers the counters and the content of the pending documents and of the last one that was read; of a
sequence the state also holds a digest of documents from all over it. A state that was changed, and a source that gives
other documents, are found out before a row is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

from packing_core.errors import PackingError
from packing_core.planning.pieces import integer
from packing_core.storage.digests import digest
from packing_core.streaming.deal import rows_done
from packing_core.streaming.pending import Pending, Piece, read_now
from packing_core.streaming.sources import Source

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
