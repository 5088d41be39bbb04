"""Documents that a stream has read and no row has taken yet: what ``stream`` plans, and what rows are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class Pending(NamedTuple):
    """Pieces that no row has taken yet: document number, first token, length and content of each."""

    ids: Int64
    starts: Int64
    lengths: Int64
    contents: list[Any]

    @classmethod
    def of(cls, pieces: Sequence[tuple[int, int, int, Any]]) -> Pending:
        ids, starts, lengths, contents = zip(*pieces, strict=True) if pieces else ((), (), (), ())
        return cls(np.array(ids, np.int64), np.array(starts, np.int64), np.array(lengths, np.int64), list(contents))

    def and_then(self, other: Pending) -> Pending:
        return Pending(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.lengths, other.lengths]),
            self.contents + other.contents,
        )

    def keep(self, places: Int64) -> Pending:
        contents = [self.contents[i] for i in places.tolist()]
        return Pending(self.ids[places], self.starts[places], self.lengths[places], contents)


def lengths_of(documents: Sequence[Any]) -> Int64:
    """int64: tokens of each document."""
    if any(issubclass(kind, Mapping) for kind in set(map(type, documents))):  # asking each document takes far longer
        documents = [document["input_ids"] if isinstance(document, Mapping) else document for document in documents]
    return np.fromiter(map(len, documents), np.int64, len(documents))


def part(document: Any, start: int, stop: int) -> Any:
    """Tokens ``start`` to ``stop`` of a document and of all its columns."""
    if not isinstance(document, Mapping):
        return document[start:stop]
    parts = {name: column[start:stop] for name, column in document.items() if name != "prompt_length"}
    if "prompt_length" in document:
        parts["prompt_length"] = min(max(document["prompt_length"] - start, 0), stop - start)
    return {name: parts[name] for name in document}
