"""Several data sets mixed by weight: each unit holds every one of them, by its share of the bytes.

Where a unit begins in each data set follows from the sizes alone, so units can be made in any order. The mixture ends
with the data set that runs out first.

``packing_core.mix`` deals documents by number, which a stream reads one after the other. That rule cannot serve here:
the number of documents before a unit is known only after reading all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from crosspack.reading import Records
from crosspack.reading.files import File, Unchanged
from crosspack.reading.places import Item, Piece, Stretch
from crosspack.reading.records import read_pieces

# How many pieces a mixture has at least, and bytes of one: each holds the weights, but for the last and for a record.
_PIECES, _SMALLEST, _LARGEST = 64, 1 << 8, 1 << 20


@dataclass(frozen=True)
class MixedStretch:
    """A stretch of records of several data sets, with their weights, which add up to 1."""

    sources: tuple[tuple[Records, float], ...]

    @property
    def file(self) -> str:
        return ", ".join(records.name for records, _ in self.sources)

    @property
    def size(self) -> int:
        """Bytes until the first data set ends, if all are plain files."""
        return int(min(records.size() / weight for records, weight in self.sources))

    def pieces(self, size: int) -> Iterator[Piece]:
        shares = (_pieces(records, max(1, round(size * weight))) for records, weight in self.sources)
        for number, parts in enumerate(zip(*shares, strict=False)):
            items = chain.from_iterable(part.items for part in parts)
            yield Piece(number, items, sum(part.size for part in parts))


@dataclass(frozen=True)
class Mixed(Records):
    """Several data sets mixed by weight, as records."""

    sources: tuple[tuple[Records, float], ...] = ()

    def stretches(self, size: int | None) -> Iterator[Stretch]:
        """Yields one, of all data sets."""
        yield MixedStretch(self.sources)

    def items(self) -> Iterator[Item]:
        """Yields the records, as :meth:`Records.items` does."""
        seen = Unchanged(self.local_files())
        for piece in read_pieces(MixedStretch(self.sources), self.grain):
            yield from piece.items
            seen.check()

    @property
    def grain(self) -> int:
        """Bytes of a piece that keeps to the weights; the last piece may lack some of the data sets."""
        return min(max(self.size() // _PIECES, _SMALLEST), _LARGEST)

    def all_files(self) -> list[File]:
        """Returns the files of all data sets in it."""
        return [file for records, _ in self.sources for file in records.all_files()]

    def size(self) -> int:
        """Bytes of all files."""
        return sum(records.size() for records, _ in self.sources)

    def left_over(self) -> dict[str, float]:
        """Data set -> about which share of it is not read, because another one ends before it."""
        end = min(records.size() / weight for records, weight in self.sources)
        shares = {records.name: 1 - end * weight / records.size() for records, weight in self.sources}
        return {name: share for name, share in shares.items() if share >= 0.01}

    def state(self) -> list[Any]:
        """Returns a value that changes when the files or the weights do."""
        return [[records.state(), weight] for records, weight in self.sources]


def _pieces(records: Records, size: int) -> Iterator[Piece]:
    """The pieces of all the files of a data set."""
    for stretch in records.stretches(size):
        yield from read_pieces(stretch, size)
