"""A job of ``crosspack pack``: options to a run in an output folder, whole, in parts, or merged from parts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from crosspack.cli.console import OUT, warn
from crosspack.cli.listing import digest
from crosspack.cli.models import DIGEST
from crosspack.cli.options import DataOptions, EncodedRecords, OrderOptions, TokenOptions, Workers, check_data
from crosspack.cli.outputs import PART, Output, writing
from crosspack.cli.progress import PackProgress
from crosspack.encoding.text import Encoder
from crosspack.encoding.tokenizer import vocabulary_digest
from crosspack.packing.journal import journal, read_journal
from crosspack.packing.mixture import Mixed
from crosspack.packing.run import Part, Run, Worker
from crosspack.packing.unit import PARTIAL, Key, OnError, Rules
from crosspack.packing.workers import Inline, Pool, Processes, Work
from crosspack.packing.writers import PACKED, Format, kept_types
from crosspack.reading import Records
from crosspack.reading.files import Unchanged, is_url, to_size
from crosspack.reading.lines import SampleBy
from crosspack.reading.places import Stretch
from packing_core.errors import PackingError
from packing_core.planning.pieces import check_seed
from packing_core.training.files import sync

MANIFEST, NOTES, BAD = "manifest.json", "incomplete.jsonl", "bad_records.jsonl"
RESULT = (NOTES, BAD, "train*", "tokenizer/*")  # what a result may hold beside the manifest
PART_FILE = "part.json"
Engine = Literal["local", "ray"]
COUNTS = ("left_out", "truncated", "dropped", "untrained")
INLINE_BYTES = 1 << 21  # less input than this is packed before a worker process has started


def _column(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-column", help=f"The column that holds {what}; other columns do not count then.")


@dataclass(frozen=True)
class PackOptions(TokenOptions, OrderOptions, DataOptions):
    """The options of ``crosspack pack`` that say what is packed and how."""

    rows_per_step: Annotated[
        int | None,
        typer.Option("--rows-per-step", min=1, help="With --equal-cost: consecutive rows that are trained together."),
    ] = None
    format: Annotated[Format, typer.Option(help="Of the packed files.")] = "parquet"
    rows_per_file: Annotated[int, typer.Option(min=1, help="Rows after which a new file begins.")] = 65_536
    workers: Workers = None
    engine: Annotated[
        Engine, typer.Option(help="Run the workers here, or on the Ray cluster that RAY_ADDRESS names.")
    ] = "local"
    on_error: Annotated[
        OnError, typer.Option("--on-error", help="A record that cannot be used: stop, skip it, or keep it in a file.")
    ] = "stop"
    max_record: Annotated[
        str, typer.Option("--max-record", help="Bytes that a record may take, decompressed; a longer one is an error.")
    ] = "64MB"
    keep: Annotated[list[str] | None, typer.Option(help="A column that the packed files keep; also `where`.")] = None
    text_column: Annotated[str | None, _column("text", "the text")] = None
    prompt_column: Annotated[str | None, _column("prompt", "prompts")] = None
    completion_column: Annotated[str | None, _column("completion", "completions")] = None
    messages_column: Annotated[str | None, _column("messages", "chats")] = None
    tokens_column: Annotated[str | None, _column("tokens", "token ids")] = None
    text_files: Annotated[
        SampleBy, typer.Option("--text-files", help="Each line of a text file is a document, or the file.")
    ] = "line"
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Bytes of input that a worker packs at once. Default: by the size.")
    ] = None
    log: Annotated[Path | None, typer.Option(help="A file to which progress is added, a line every ten seconds.")] = (
        None
    )
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote.")] = False

    @property
    def named_columns(self) -> tuple[tuple[str, str], ...]:
        named = {
            "text": self.text_column,
            "prompt": self.prompt_column,
            "completion": self.completion_column,
            "messages": self.messages_column,
            "input_ids": self.tokens_column,
        }
        return tuple((name, column) for name, column in named.items() if column is not None)


@dataclass(frozen=True)
class Job:
    """A packing job: the data, and how they are encoded and packed.

    Attributes:
        about: names of the data, of their tokenizer and of the policy, for the manifest.
        size: bytes of input, as far as that is known.
        run: all that decides the result, for the journal.
        inputs: the files of the data as they were before any was read.
    """

    about: dict[str, str]
    stretches: list[Stretch]
    size: int
    encoder: Encoder | None
    rules: Rules
    run: dict[str, Any]
    save_tokenizer: Callable[[Path], Any]
    inputs: Unchanged | None = None


def open_job(options: PackOptions, part: Part) -> Job:
    """Open the data and the tokenizer.

    Raises:
        PackingError: one of them cannot be used.
    """
    check_seed(options.seed)
    rows, policy, keep = options.row_rule(), options.policy, tuple(options.keep or ())
    options.check_step(options.rows_per_step)
    max_record, lenient = to_size(options.max_record), options.on_error != "stop"
    if own := [name for name in keep if name in PACKED]:
        raise PackingError(
            f"--keep {own[0]}: packed files have a column of that name themselves: rename it in the data"
        )
    records = check_data(
        options.data,
        options.split,
        options.tokenizer,
        policy=policy,
        more=[options.order_by] if options.order_by else (),
        keep=keep,
        sample_by=options.text_files,
        max_record=max_record,
        lenient=lenient,
    )
    inputs = Unchanged(records.all_files())
    source = EncodedRecords.of(
        records, options.tokenizer, policy, trust_remote_code=options.trust_remote_code, lenient=lenient
    )
    source.encoder.carried = keep
    source.encoder.limit(max_record)
    OUT.print(source.describe())
    if isinstance(records, Mixed):
        for name, share in records.left_over().items():
            warn(f"about {share:.0%} of {name} is not read: by the weights another data set ends first")
    size = records.size()
    rules = Rules(
        rows,
        options.seed,
        options.block_size or unit_size(size, options.capacity, records),
        "uint16" if source.encoder.entries <= 1 << 16 else "int32",
        keep,
        options.rows_per_step,
    )
    run = {
        "kind": "run",
        "crosspack": version("crosspack"),
        "data": records.state(),
        "split": options.split,
        "sample_by": options.text_files,
        "max_record": max_record,
        "tokenizer": _digest_of(source.encoder.tokenizer),
        DIGEST: vocabulary_digest(source.encoder.tokenizer),
        "policy": asdict(policy),
        "rules": asdict(rules),
        "format": options.format,
        "rows_per_file": options.rows_per_file,
        "part": list(part),
    }
    return Job(
        {"data": records.name, "tokenizer": source.tokenizer, "policy": source.encoder.describe()},
        list(records.stretches(rules.size)),
        size,
        source.encoder,
        rules,
        json.loads(json.dumps(run)),
        source.encoder.tokenizer.save_pretrained,
        inputs,
    )


def unit_size(size: int, capacity: int, records: Records | None = None) -> int:
    """Bytes of a unit: a 64th of the input, but enough to fill rows, and no more than a process should hold.

    Those of a mixture are as small as its weights need.

    >>> unit_size(50_000, 2048), unit_size(1_000_000_000, 2048), unit_size(10**13, 2048), unit_size(10**9, 10**6)
    (1048576, 8388608, 16777216, 67108864)
    """
    wanted = min(max(size // 64, 1 << 20, 64 * capacity), max(1 << 24, 64 * capacity))
    most = records.grain if isinstance(records, Mixed) else wanted
    return 1 << (min(wanted, most).bit_length() - 1)


def _digest_of(tokenizer: Any) -> str:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if hasattr(backend, "to_str") else repr(sorted(tokenizer.get_vocab().items()))
    return digest([content, getattr(tokenizer, "chat_template", None), tokenizer.name_or_path])


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def opened_pool(
    worker: Work, jobs: int, size: int, workers: int | None = None, engine: Engine = "local"
) -> Iterator[tuple[Pool, int]]:
    """Yields the pool that runs the jobs, and how many it runs at a time.

    Args:
        workers: how many processes; by default one for each core, and none for little input.
    """
    count = min(workers or cores(), jobs)
    if engine == "ray":
        from crosspack.packing.onray import RayPool

        pool = RayPool(worker, workers)
        yield pool, pool.count
    elif count <= 1 or (workers is None and size < INLINE_BYTES):
        yield Inline(worker), 1
    else:
        with Processes(worker, count) as processes:
            yield processes, count


def pack_data(output: str, options: PackOptions) -> dict[str, Any]:
    """Pack all of the data; returns the manifest."""
    if is_url(output):
        from crosspack.cli.remote import staged

        with staged(output, MANIFEST, overwrite=options.overwrite) as folder:
            return _pack_here(folder, replace(options, overwrite=True), staged=True)
    return _pack_here(Path(output), options)


def _pack_here(folder: Path, options: PackOptions, *, staged: bool = False) -> dict[str, Any]:
    job = open_job(options, Part())
    run_digest = digest(job.run)
    if staged and (folder / MANIFEST).exists():  # what was not uploaded before the run was killed
        manifest = read_json(folder / MANIFEST)
        if manifest["run"] == run_digest:
            return manifest
    with writing(folder, MANIFEST, names=RESULT, overwrite=options.overwrite, run=run_digest) as target:
        if target.finished:
            return read_json(folder / MANIFEST)
        units = units_folder(target, job)
        with _progress(job, options) as seen:
            run = make_units(target, job, options, Part(), units, seen)
            manifest = finish_job(target, run, options, job, lambda key: units)
        target.publish()
    return manifest


def pack_part(output: str, options: PackOptions, part: Part) -> dict[str, Any]:
    """Do one part of the work, in a folder of its own inside the output; returns its result."""
    if is_url(output):
        raise PackingError("--part: pass an --output that all parts share, on a network file system")
    job = open_job(options, part)
    folder = Path(output) / f"{PART}{part.number + 1:05d}-of-{part.parts:05d}"
    with writing(folder, PART_FILE, names=("units/*",), overwrite=options.overwrite, run=digest(job.run)) as target:
        if target.finished:
            return read_json(folder / PART_FILE)
        with _progress(job, options) as seen:
            run = make_units(target, job, options, part, units_folder(target, job, in_result=True), seen)
        job.save_tokenizer(target.partial / "tokenizer")
        content = {
            "run": {name: value for name, value in job.run.items() if name != "part"},
            "stretches": len(job.stretches),
            **job.about,
            "part": list(part),
            "outcomes": [asdict(run.outcomes[key]) for key in sorted(run.outcomes)],
        }
        (target.partial / PART_FILE).write_text(json.dumps(content))
        target.publish()
    return {"part": part.number + 1, "of": part.parts, "documents": run.totals.documents, "tokens": run.totals.tokens}


def units_folder(target: Output, job: Job, *, in_result: bool = False) -> Path:
    """The folder for units: with those of an earlier run, if it was a run of the same job."""
    assert target.work is not None
    entries, _ = read_journal(target.work / "journal")
    if not entries or entries[0] != job.run:
        for path in (target.partial, target.work):
            shutil.rmtree(path, ignore_errors=True)
        target.partial.mkdir(parents=True)
    folder = (target.partial if in_result else target.work) / "units"
    folder.mkdir(exist_ok=True)
    for unfinished in folder.glob(f"{PARTIAL}*"):
        unfinished.unlink()
    sync(folder.parent)
    target.keep = True  # what is finished counts, whatever happens
    return folder


def _progress(job: Job, options: PackOptions) -> PackProgress:
    return PackProgress(OUT, job.size, options.capacity, options.log)


def make_units(target: Output, job: Job, options: PackOptions, part: Part, units: Path, seen: PackProgress) -> Run:
    """Make all units of a part, or those that an earlier run did not make."""
    assert target.work is not None
    worker = Worker(job.encoder, job.rules, options.on_error, job.run["format"], units, target.partial)
    with journal(target.work / "journal", job.run) as log:
        run = Run(job.stretches, worker, log, part=part, watch=seen.update, inputs=job.inputs)
        if run.resumed:
            OUT.print(f"going on: {run.resumed:,} units are finished", style="dim")
        seen.begin(run.totals)
        jobs = sum(1 for _ in run.jobs(options.workers or cores()))
        try:
            with opened_pool(worker, jobs, job.size, options.workers, options.engine) as (pool, count):
                run.make_units(pool, count)
        except BaseException:
            target.keep = bool(run.outcomes)
            raise
    return run


def finish_job(
    target: Output, run: Run, options: PackOptions, job: Job, folder_of: Callable[[Key], Path]
) -> dict[str, Any]:
    """Pack the leftovers and write the files and the manifest."""
    totals, rules, rows = run.totals, job.rules, job.rules.rows
    if not totals.documents:
        target.keep = False
        raise PackingError("no document has a token to train on: check --data, its columns and --loss")
    assert target.work is not None
    sequence = run.pack_leftovers(folder_of)
    with journal(target.work / "journal", job.run) as log:
        run.journal = log
        files = -(-totals.rows // job.run["rows_per_file"])
        writer = replace(
            run.worker, encoder=None, kept=kept_types(path for path, rows in sequence if rules.keep and rows)
        )
        with opened_pool(writer, files, totals.size, options.workers, options.engine) as (pool, _):
            run.write_files(pool, sequence, job.run["rows_per_file"])
    kinds: tuple[tuple[str, Literal["notes", "bad"]], ...] = ((NOTES, "notes"), (BAD, "bad"))
    for name, kind in kinds:
        lines = run.notes(folder_of, kind)
        if (first := next(lines, None)) is not None:
            with open(target.partial / name, "wb") as out:
                out.writelines([first])
                out.writelines(lines)
    job.save_tokenizer(target.partial / "tokenizer")
    manifest = {
        "crosspack": version("crosspack"),
        **job.about,
        DIGEST: job.run[DIGEST],
        "capacity": rows.capacity,
        "overflow": rows.overflow,
        "context": rows.context_tokens,
        "min_piece": rows.min_piece,
        "max_segments": rows.max_segments,
        "packing": rows.strategy,
        "order": rows.order,
        "order_by": rows.keys,
        "equal_cost": rules.equal_step is not None,
        "rows_per_step": rules.equal_step,
        "seed": rules.seed,
        "records": totals.records,
        "bad_records": totals.counts.get("bad", 0),
        "documents": totals.documents,
        **{what: totals.counts.get(what, 0) for what in COUNTS},
        "rows": totals.rows,
        "tokens": totals.tokens,
        "trained_tokens": totals.trained,
        "efficiency": totals.tokens / (totals.rows * rows.capacity),
        "format": job.run["format"],
        "input_ids": rules.dtype,
        "run": digest(job.run),
        "files": [asdict(file) for file in run.files],
    }
    (target.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
