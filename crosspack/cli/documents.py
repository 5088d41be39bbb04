"""All data, read and tokenised by the processes and in the pieces of ``crosspack pack``, for the other commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from crosspack.cli import launch
from crosspack.cli.console import OUT
from crosspack.cli.options import EncodedRecords, documents_of
from crosspack.cli.packjob import INLINE_BYTES, cores, opened_pool, unit_size
from crosspack.cli.packprogress import PackProgress
from crosspack.encoding.text import Encoder
from crosspack.packing.mixture import Mixed
from crosspack.packing.run import PieceJob, Totals, each_piece, piece_jobs, piece_results
from crosspack.packing.unit import Key, Outcome
from crosspack.packing.workers import Work
from crosspack.reading import Records
from crosspack.reading.files import Unchanged
from crosspack.reading.places import Piece
from packing_core.errors import PackingError, first_line
from packing_core.training.schedule import Document


def in_pieces(
    records: Records, capacity: int, reader: Callable[[int], Work], workers: int | None = None
) -> Iterator[tuple[Key, Any]]:
    """Yields the number of each piece of the data with what was read of it, as they come, and shows the progress.

    Args:
        records: the data.
        capacity: tokens of a row.
        reader: makes the work of a process, whose results are (Outcome, what was read), for pieces of so many bytes.
        workers: how many processes; by default this rank's share of the cores.
    """
    total = records.size()
    # the order of a mixture depends on the size of its pieces
    size = records.grain if isinstance(records, Mixed) else unit_size(total, capacity, records)
    if workers is None:
        workers = 1 if total < INLINE_BYTES else max(1, cores() // launch.ranks_here())
    jobs = list(piece_jobs(list(records.stretches(size)), size, workers))
    read, seen = Totals(), Unchanged(records.local_files())
    with (
        PackProgress(OUT, total, capacity, None) as progress,
        opened_pool(reader(size), len(jobs), total, workers) as (pool, _),
    ):
        for _, (outcome, found) in piece_results(pool, jobs, seen.check):
            read.add(outcome)
            progress.update(read)
            yield outcome.key, found


@dataclass
class _Read:
    """Holds what was read of a piece: its documents, how many have nothing to train on, why records were skipped."""

    documents: list[Document] = field(default_factory=list)
    left_out: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _PieceReader:
    """Reads pieces of the data into their documents; this is what is pickled to processes."""

    encoder: Encoder
    capacity: int
    overflow: str
    key: str | None
    lenient: bool
    size: int

    def __call__(self, job: PieceJob) -> Iterator[tuple[Outcome, _Read]]:
        return each_piece(job, self.size, self._read)

    def _read(self, key: Key, piece: Piece) -> tuple[Outcome, _Read]:
        found, before = _Read(), self.encoder.left_out

        def skip(_: Any, error: PackingError) -> None:
            found.skipped.append(first_line(error))

        found.documents += documents_of(
            self.encoder, piece.items, self.capacity, self.overflow, key=self.key, skip=skip if self.lenient else None
        )
        found.left_out = self.encoder.left_out - before
        tokens = sum(len(document.ids) for document in found.documents)
        return Outcome(*key, piece.size, documents=len(found.documents), left_tokens=tokens), found


def documents_together(
    source: EncodedRecords,
    capacity: int,
    overflow: str,
    *,
    key: str | None = None,
    skipped: list[str] | None = None,
    workers: int | None = None,
) -> Iterator[Document]:
    """The documents of ``source.documents``, in their order, tokenised by several processes.

    Args:
        source: the encoded records, which count what was left out.
        capacity, overflow, key: as of :meth:`EncodedRecords.documents`.
        skipped: is given why records were left out; None raises an error for the first that cannot be used.
        workers: how many processes; by default this rank's share of the cores.
    """
    before = source.encoder.left_out
    if workers is None and type(source.encoder.tokenizer).__module__.startswith("transformers_modules"):
        workers = 1  # code of a model's folder, which other processes have not loaded
    reader = partial(_PieceReader, source.encoder, capacity, overflow, key, skipped is not None)
    parts = dict(in_pieces(source.records, capacity, reader, workers))
    source.encoder.left_out = before + sum(part.left_out for part in parts.values())
    for number in sorted(parts):
        part = parts.pop(number)
        if skipped is not None:
            skipped += part.skipped
        yield from part.documents
