"""A packing run: units by the workers, then files of their rows; resumes from a journal.

    stretches of the input -> units (workers) -> rows and leftovers on disk
    leftovers of all units, in order          -> the last rows (this process); under --order and --equal-cost, all rows
    rows of all units, in order               -> files of so many rows (workers)

Everything that a finished unit leaves on disk is complete and on the device before the journal says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from crosspack.encoding.kinds import as_numbers
from crosspack.encoding.text import Encoder
from crosspack.packing.journal import Journal
from crosspack.packing.row_files import Rows, joined
from crosspack.packing.unit import (
    KEY,
    Key,
    OnError,
    Outcome,
    Rules,
    make_unit,
    pack_documents,
    write,
)
from crosspack.packing.workers import Failed, Finished, Pool
from crosspack.packing.writers import Format, Kept, Written, file_name, write_file
from crosspack.reading.files import Unchanged, is_url
from crosspack.reading.lines import Range, SingleRecordFile
from crosspack.reading.places import Piece, Stretch
from crosspack.reading.records import FilelessRecords, dealt, read_pieces
from crosspack.reading.tables import Group
from packing_core.errors import PackingError
from packing_core.planning.epochs import plan_steps
from packing_core.planning.packplan import PackPlan
from packing_core.planning.plan import plan
from packing_core.training.files import sync

Result = TypeVar("Result")

PACKED_TOGETHER = 1 << 22  # tokens of leftovers, or 64 rows


class Part(NamedTuple):
    """Part ``number``, from 0, of the ``parts`` of the work."""

    number: int = 0
    parts: int = 1


class PieceJob(NamedTuple):
    """A job: pieces ``start``, ``start + step``, ... of a stretch, without those that are done."""

    number: int
    stretch: Stretch
    start: int
    step: int
    done: frozenset[int]


def piece_jobs(
    stretches: Sequence[Stretch], size: int, workers: int, *, part: tuple[int, int] = (0, 1), done: Iterable[Key] = ()
) -> Iterator[PieceJob]:
    """The pieces of a part that are not done, in order. How they are dealt to jobs does not change what they are."""
    numbers: dict[int, set[int]] = {}
    for key in done:
        numbers.setdefault(key.stretch, set()).add(key.piece)
    for number, stretch, start, stride in dealt(stretches, *part):
        finished = frozenset(numbers.get(number, ()))
        single = isinstance(stretch, Range | SingleRecordFile)
        if single and finished:
            continue
        several = not (single or isinstance(stretch, FilelessRecords)) and not _small(stretch, size)
        share = workers if several and len(stretches) < 4 * workers else 1
        for worker in range(share):
            yield PieceJob(number, stretch, start + stride * worker, stride * share, finished)


def each_piece(job: PieceJob, size: int, work: Callable[[Key, Piece], Result]) -> Iterator[Result]:
    """Yields what ``work`` returns for each piece of a job; an error carries the number of its piece."""
    for piece in read_pieces(job.stretch, size, job.start, job.step):
        if piece.number not in job.done:
            try:
                yield work(Key(job.number, piece.number), piece)
            except Exception as error:
                vars(error)["piece"] = piece.number  # which of two errors is the first of the input
                raise


def piece_results(
    pool: Pool, jobs: Iterable[PieceJob], check: Callable[[], None] = lambda: None
) -> Iterator[tuple[PieceJob, Any]]:
    """Yields the jobs with each result, as they come.

    Args:
        check: is called at the end, before an error of a job is raised.

    Raises:
        PackingError: a record cannot be used; the first one of the input, whichever process came upon one first.
    """
    for job in jobs:
        pool.submit(job)
    failed: dict[tuple[int, int], Exception] = {}
    for job, result in pool.results():
        if isinstance(result, Failed):
            failed[job.number, vars(result.error).get("piece", job.start)] = result.error
            first = min(failed)[0]
            pool.forget(lambda other, first=first: other.number > first)  # type: ignore[misc]
        elif not isinstance(result, Finished):
            yield job, result
    check()
    if failed:
        raise failed[min(failed)]


class FileJob(NamedTuple):
    """A job: file ``number``, of rows ``begin`` to ``end`` of each of these units' files."""

    number: int
    parts: tuple[tuple[Path, int, int], ...]


@dataclass(frozen=True)
class Worker:
    """Does the jobs of a run; this is what is pickled to processes."""

    encoder: Encoder | None  # None where all units are made
    rules: Rules
    on_error: OnError
    form: Format
    units: Path
    result: Path
    kept: Kept = field(default_factory=dict)

    def __call__(self, job: PieceJob | FileJob) -> Iterator[Outcome | Written]:
        if isinstance(job, FileJob):
            written = write_file(self.result, job.number, self.form, self._rows(job), self.kept)
            sync(self.result / written.name)
            yield written
            return
        yield from each_piece(job, self.rules.size, self._unit)

    def _unit(self, key: Key, piece: Piece) -> Outcome:
        assert self.encoder is not None
        return make_unit(key, piece, self.encoder, self.rules, self.on_error, self.units)

    def _rows(self, job: FileJob) -> Iterator[Rows]:
        for path, begin, end in job.parts:
            yield Rows.load(path)[begin:end]


class Run:
    """The state of a run. Units are journaled as they are finished.

    Args:
        stretches: all of the input, also of the other parts.
        inputs: the files that are read; a unit counts if its file is still the same after it was made.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        worker: Worker,
        journal: Journal,
        *,
        part: Part,
        watch: Callable[[Outcome], None] = lambda totals: None,
        inputs: Unchanged | None = None,
    ) -> None:
        self.stretches = stretches
        self.worker = worker
        self.journal = journal
        self.part = part
        self.totals = Outcome(-1, -1)
        self.outcomes: dict[Key, Outcome] = {}
        self.files: list[Written] = []
        self._watch = watch
        self._inputs = inputs or Unchanged([])
        try:
            for entry in journal.entries:
                content = {name: value for name, value in entry.items() if name != "kind"}
                if entry["kind"] == "unit":
                    self.note(Outcome(**content))
                elif entry["kind"] == "file":
                    self.files.append(Written(**content))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise PackingError(
                f"{journal.path} is not a journal that crosspack wrote: remove {journal.path.parent} to begin anew"
            ) from None
        self.resumed = len(self.outcomes)

    def note(self, outcome: Outcome) -> None:
        """Count a finished unit."""
        self.outcomes[outcome.key] = outcome
        self.totals.add(outcome)

    def jobs(self, workers: int) -> Iterator[PieceJob]:
        """The units that are not made yet, in order."""
        return piece_jobs(self.stretches, self.worker.rules.size, workers, part=self.part, done=self.outcomes)

    def make_units(self, pool: Pool, workers: int) -> None:
        """Make all units of this part.

        Raises:
            PackingError: a file changed, or a record cannot be used; the first one of the input, whichever process
                came upon one first.
        """
        for job, outcome in piece_results(pool, self.jobs(workers), self._inputs.check):
            if not is_url(job.stretch.file):  # each look at a URL takes a request: they are compared at the end
                self._inputs.check(job.stretch.file)
            self.journal.append("unit", **asdict(outcome))
            self.note(outcome)
            self._watch(self.totals)

    def pack_leftovers(self, folder_of: Callable[[Key], Path]) -> list[tuple[Path, int]]:
        """Pack the documents that units left over, into last units that leave none.

        Returns:
            The files of rows of all units, in order, and how many rows each has.
        """
        rules = self.worker.rules
        sequence = [(key.file(folder_of(key), "rows"), self.outcomes[key].rows) for key in sorted(self.outcomes)]
        if rules.planned_at_once:
            return self._pack_at_once(folder_of)
        limit = max(PACKED_TOGETHER, 64 * rules.rows.capacity)
        held: list[Rows] = []
        leftovers = Outcome(len(self.stretches), -1)

        def emit(*, last: bool) -> list[Rows]:
            leftovers.piece += 1
            full, left = pack_documents(joined(held), rules, leftovers.key, all_rows=last)
            if len(full):
                sequence.append(self._kept(full, leftovers.key))
            return [left] if len(left) else []

        for key in sorted(self.outcomes):
            if self.outcomes[key].left:
                held.append(Rows.load(key.file(folder_of(key), "left")))
                if sum(len(rows.ids) for rows in held) >= limit:
                    held = emit(last=False)
        if held:
            emit(last=True)
        return sequence

    def _pack_at_once(self, folder_of: Callable[[Key], Path]) -> list[tuple[Path, int]]:
        """Pack all documents by one plan."""
        rules = self.worker.rules
        keys = [key for key in sorted(self.outcomes) if self.outcomes[key].left]
        first = {kind: where for key in reversed(keys) for kind, where in self.outcomes[key].keys.items()}
        if len(first) > 1:
            raise PackingError(
                f"--order-by {rules.rows.keys} is a number at {first['number']} and a text at {first['text']}: give "
                "every record a number, or every record a text"
            )
        planned = planned_rows([key.file(folder_of(key), "left") for key in keys], rules)
        return [self._kept(rows, Key(len(self.stretches), number)) for number, rows in enumerate(planned)]

    def _kept(self, rows: Rows, key: Key) -> tuple[Path, int]:
        """Writes rows of no unit of the input, and counts them; returns their file and how many they are."""
        path = key.file(self.worker.units, "rows")
        write(path, rows)
        trained = int(np.count_nonzero(rows.targets))
        self.totals.add(Outcome(*key, rows=len(rows), tokens=len(rows.ids), trained=trained))
        return path, len(rows)

    def write_files(self, pool: Pool, sequence: Sequence[tuple[Path, int]], rows_per_file: int) -> None:
        """Write the files that are not written yet."""
        there = {file.name for file in self.files}
        for job in file_jobs(sequence, rows_per_file):
            if file_name(self.worker.form, job.number) not in there:
                pool.submit(job)
        failed: list[Exception] = []
        for _, result in pool.results():
            if isinstance(result, Written):
                self.journal.append("file", **asdict(result))
                self.files.append(result)
                self._watch(self.totals)
            elif isinstance(result, Failed):
                failed.append(result.error)
                pool.forget(lambda job: True)
        if failed:
            raise failed[0]
        self.files.sort(key=lambda file: file.name)

    def notes(self, folder: Callable[[Key], Path], kind: Literal["notes", "bad"]) -> Iterator[bytes]:
        """The contents of all units' notes, in order."""
        for key in sorted(self.outcomes):
            if (path := key.file(folder(key), kind)).exists():
                yield path.read_bytes()


TOGETHER = 1 << 26  # tokens of the rows that are made at a time


def planned_rows(files: Sequence[Path], rules: Rules) -> Iterator[Rows]:
    """Yields the rows of one plan in the order of training, those of about a gigabyte of tokens at a time.

    The plan needs the length and the key of every document. Tokens are read of the files that the rows at hand draw on.

    Args:
        files: the documents that units handed on, in the order of the input.
    """
    outlines = [Rows.outline(path) for path in files]
    lengths = [outline.segments for outline in outlines]
    rows = _plan(np.concatenate(lengths), [outline.values for outline in outlines], rules)
    first = np.cumsum([0, *map(len, lengths)])
    upto = np.cumsum(rows.row_tokens)
    blocks = np.flatnonzero(np.diff(upto // TOGETHER, prepend=-1))
    for begin, end in zip(blocks, [*blocks[1:], rows.n_rows], strict=True):
        counts = np.diff(rows.row_offsets[begin : end + 1])
        wanted = rows.source[rows.row_offsets[begin] : rows.row_offsets[end]]
        yield _gathered(files, first, wanted).take(np.argsort(np.argsort(wanted)), counts)


def _plan(lengths: Any, values: Sequence[Mapping[str, Any]], rules: Rules) -> PackPlan:
    """The rows of all documents, whose values the units kept."""
    if rules.equal_step is not None:
        return plan_steps(lengths, rules.rows, rules.equal_step, seed=rules.seed)
    keys = None if rules.rows.keys is None else [key for of_unit in values for key in of_unit[KEY]]
    if keys is not None and rules.rows.order == "sorted":
        keys = as_numbers(keys)
    return plan(lengths, replace(rules.rows, keys=keys), seed=rules.seed)


def _gathered(files: Sequence[Path], first: Any, wanted: Any) -> Rows:
    """The wanted documents by rising number."""
    ordered = np.sort(wanted)
    unit = np.searchsorted(first, ordered, side="right") - 1
    parts = []
    for number in np.unique(unit).tolist():
        own = ordered[unit == number] - first[number]
        part = Rows.load(files[number]).take(own, np.ones(len(own), np.int64))
        part.values.pop(KEY, None)
        parts.append(part)
    return joined(parts)


def _small(stretch: Stretch, size: int) -> bool:
    return isinstance(stretch, Group) and stretch.number is not None and stretch.size <= size


def file_jobs(sequence: Sequence[tuple[Path, int]], rows_per_file: int) -> Iterator[FileJob]:
    """Yields the rows of each file, as ranges of the units' rows."""
    number, room = 0, rows_per_file
    parts: list[tuple[Path, int, int]] = []
    for path, rows in sequence:
        begin = 0
        while begin < rows:
            end = min(rows, begin + room)
            parts.append((path, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield FileJob(number, tuple(parts))
                number, room, parts = number + 1, rows_per_file, []
    if parts:
        yield FileJob(number, tuple(parts))
