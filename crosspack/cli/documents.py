"""All data, read and tokenised by the processes and in the pieces of ``crosspack pack``, for the other commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from crosspack.cli import launch
from crosspack.cli.console import OUT
from crosspack.cli.options import EncodedRecords
from crosspack.cli.packjob import INLINE_BYTES, cores, opened_pool, unit_size
from crosspack.cli.progress import PackProgress
from crosspack.encoding.kinds import check_key, checked, key_of, refusing
from crosspack.encoding.text import Encoder
from crosspack.encoding.tokens import check_length
from crosspack.packing.mixture import Mixed
from crosspack.packing.run import each_piece, piece_jobs, piece_results
from crosspack.packing.unit import Key, Outcome
from crosspack.reading import Records
from crosspack.reading.files import Unchanged
from crosspack.reading.places import Item, Piece
from packing_core.planning.rule import RowRule
from packing_core.training.schedule import EncodedDocument


def in_pieces(
    records: Records, capacity: int, read: Callable[[Key, Piece], tuple[Outcome, Any]], workers: int | None = None
) -> Iterator[tuple[Key, Any]]:
    """Yields the number of each piece of the data with what was read of it, as they come, and shows the progress.

    Args:
        read: counts a piece and returns what is kept of it; this is what is pickled to processes.
        workers: how many processes; by default this rank's share of the cores.
    """
    total = records.size()
    # the order of a mixture depends on the size of its pieces
    size = records.grain if isinstance(records, Mixed) else unit_size(total, capacity, records)
    if workers is None:
        workers = 1 if total < INLINE_BYTES else max(1, cores() // launch.ranks_here())
    jobs = list(piece_jobs(list(records.stretches(size)), size, workers))
    counted, seen = Outcome(-1, -1), Unchanged(records.local_files())
    work = partial(each_piece, size=size, work=read)
    with (
        PackProgress(OUT, total, capacity, None) as progress,
        opened_pool(work, len(jobs), total, workers) as (pool, _),
    ):
        for _, (outcome, found) in piece_results(pool, jobs, seen.check):
            counted.add(outcome)
            progress.update(counted)
            yield outcome.key, found


@dataclass
class _Read:
    """Holds what was read: documents, how many have nothing to train on, and why records were skipped."""

    documents: list[EncodedDocument] = field(default_factory=list)
    left_out: int = 0
    skipped: list[str] = field(default_factory=list)


def _documents_of(
    encoder: Encoder, rule: RowRule, skipped: list[str] | None, items: Iterable[Item]
) -> Iterator[EncodedDocument]:
    """Yields the documents of some records; of those that cannot be used, ``skipped`` is given the reason, or raises.

    Raises:
        CapacityError: a document is too long.
        PackingError: a record cannot be used.
    """
    refuse = refusing(skipped)
    for found in encoder.encoded(checked(items, partial(check_key, column=rule.keys), refuse), refuse):
        if rule.overflow == "error":
            check_length(str(found.where), found.document, rule.capacity)
        key = None if rule.keys is None else key_of(found.where, found.record, rule.keys)
        yield found.document._replace(key=key)


def _read_piece(encoder: Encoder, rule: RowRule, lenient: bool, key: Key, piece: Piece) -> tuple[Outcome, _Read]:
    result, before = _Read(), encoder.left_out
    result.documents += _documents_of(encoder, rule, result.skipped if lenient else None, piece.items)
    result.left_out = encoder.left_out - before
    tokens = sum(len(document.ids) for document in result.documents)
    return Outcome(*key, piece.size, documents=len(result.documents), left_tokens=tokens), result


def documents_together(
    source: EncodedRecords,
    rule: RowRule,
    *,
    limit: int | None = None,
    skipped: list[str] | None = None,
    workers: int | None = None,
) -> Iterator[EncodedDocument]:
    """Yields the documents of a source in their order, tokenised by several processes.

    Args:
        rule: of the rows; a document that is too long under ``error`` raises. Its ``keys`` name the column of keys.
        limit: of the first documents alone, as many as this; the rest is not read.
        skipped: is given why records were left out; None raises an error for the first that cannot be used.
    """
    if limit is not None:
        yield from islice(_documents_of(source.encoder, rule, skipped, source.records.items()), limit)
        return
    before = source.encoder.left_out
    if workers is None and type(source.encoder.tokenizer).__module__.startswith("transformers_modules"):
        workers = 1  # code of a model's folder, which other processes have not loaded
    read = partial(_read_piece, source.encoder, rule, skipped is not None)
    parts = dict(in_pieces(source.records, rule.capacity, read, workers))
    source.encoder.left_out = before + sum(part.left_out for part in parts.values())
    for number in sorted(parts):
        part = parts.pop(number)
        if skipped is not None:
            skipped += part.skipped
        yield from part.documents
