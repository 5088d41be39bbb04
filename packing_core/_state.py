"""What a stream saves to continue: counters, the numbers of pending documents, and a fingerprint of all of it.

The fingerprint covers the counters and the content of the pending documents and of the last one that was read. A state
that was changed, and a source that gives other documents, are found out before a row is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from packing_core._arrays import as_array
from packing_core._pending import Pending
from packing_core._pieces import integer
from packing_core.errors import PackingError

COUNTERS = ("epoch", "rows", "round", "rows_before", "cursor")


@dataclass(frozen=True)
class Mark:
    """Where a round begins: rows of all shards before it, documents read, those pending, and the last one read."""

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
        """Of the documents: the same for lists and arrays of the same numbers."""
        hashed = blake2b(digest_size=16)
        pieces = [*zip(self.pending.ids.tolist(), self.pending.starts.tolist(), self.pending.contents, strict=True)]
        for number, start, content in [*pieces, *([(self.cursor - 1, -1, self.last)] if self.cursor else [])]:
            columns = content if isinstance(content, Mapping) else {"input_ids": content}
            for name in sorted(columns, key=str):
                array = as_array(columns[name], f"{name} of document {number}")
                wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
                hashed.update(f"{number} {start} {name} {wide.shape} {wide.dtype}".encode())
                hashed.update(wide.tobytes())
        return hashed.hexdigest()


def sealed(state: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """The state with its fingerprint, given the digest of its documents."""
    text = repr([digest, *((name, state[name]) for name in sorted(state) if name != "fingerprint")])
    return {**state, "fingerprint": blake2b(text.encode(), digest_size=16).hexdigest()}


def read_state(state: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The state in plain Python numbers, checked as far as that can be done without its documents.

    Raises:
        PackingError: it is none, is of other options, or its numbers make no sense.
    """
    if not isinstance(state, Mapping):
        raise PackingError(f"the state is a {type(state).__name__}: pass what state_dict() of a stream returned")
    for name in (*options, *COUNTERS, "pending", "fingerprint"):
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
    if not well_formed or counters["rows"] < counters["rows_before"]:
        raise PackingError(
            "the numbers of the state contradict each other: pass what state_dict() of a stream returned"
        )
    return {**options, **counters, "pending": pending, "fingerprint": state["fingerprint"]}


def _count(name: str, value: Any) -> int:
    number = integer(value)
    if number is None or number < 0:
        raise PackingError(
            f"{name} of the state is {value!r}: it counts from 0, pass what state_dict() of a stream returned"
        )
    return number
