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
from typing import Any

from crosspack.cli.checks import check_order, check_steps
from crosspack.cli.console import OUT, warn
from crosspack.cli.listing import digest
from crosspack.cli.options import EncodedRecords, Engine, check_data
from crosspack.cli.outputs import PART, Output, writing
from crosspack.cli.packprogress import PackProgress
from crosspack.encoding.text import Encoder, Policy
from crosspack.packing.journal import journal, read_journal
from crosspack.packing.mixture import Mixed
from crosspack.packing.run import Part, Run, Worker
from crosspack.packing.unit import UNFINISHED, Key, OnError, Rules, Strategy, bad_file, notes_file
from crosspack.packing.workers import Inline, Pool, Processes
from crosspack.packing.writers import PACKED, Format, mds_index
from crosspack.reading import Records
from crosspack.reading.files import Unchanged, is_url
from crosspack.reading.lines import SampleBy
from crosspack.reading.places import Stretch
from packing_core.errors import PackingError
from packing_core.planning.order import Order
from packing_core.planning.pieces import Overflow, OverflowRule, check_seed
from packing_core.training.files import sync

MANIFEST, NOTES, BAD = "manifest.json", "incomplete.jsonl", "bad_records.jsonl"
RESULT = (NOTES, BAD, "train*", "shard.*", "index.json", "tokenizer/*")  # what a result may hold beside the manifest
PART_FILE = "part.json"
COUNTS = ("left_out", "truncated", "dropped", "untrained")
INLINE_BYTES = 1 << 21  # less input than this is packed before a worker process has started


@dataclass(frozen=True)
class PackOptions:
    """The options of ``crosspack pack``."""

    data: tuple[str, ...]
    split: str
    tokenizer: str | None
    policy: Policy
    capacity: int
    overflow: Overflow
    context: int | None
    min_piece: int
    max_segments: int | None
    packing: Strategy
    order: Order
    order_by: str | None
    equal_cost: bool
    rows_per_step: int | None
    form: Format
    rows_per_file: int
    keep: tuple[str, ...]
    sample_by: SampleBy
    block_size: int | None
    seed: int
    workers: int | None
    engine: Engine
    on_error: OnError
    max_record: int
    log: Path | None
    overwrite: bool
    trust_remote_code: bool


@dataclass(frozen=True)
class Job:
    """A packing job: the data, and how they are encoded and packed.

    Attributes:
        size: bytes of input, as far as that is known.
        run: all that decides the result, for the journal.
        inputs: the files of the data as they were before any was read.
    """

    name: str
    stretches: list[Stretch]
    size: int
    encoder: Encoder | None
    tokenizer: str
    policy: str
    rules: Rules
    form: Format
    rows_per_file: int
    run: dict[str, Any]
    save_tokenizer: Callable[[Path], Any]
    inputs: Unchanged | None = None


def open_job(given: PackOptions, part: Part) -> Job:
    """Open the data and the tokenizer.

    Raises:
        PackingError: one of them cannot be used.
    """
    check_seed(given.seed)
    check_order(asdict(given))
    check_steps(given.equal_cost, given.rows_per_step)
    rule = OverflowRule.checked(given.capacity, given.overflow, given.context, given.min_piece)
    if own := [name for name in given.keep if name in PACKED]:
        raise PackingError(
            f"--keep {own[0]}: packed files have a column of that name themselves: rename it in the data"
        )
    records = check_data(
        given.data,
        given.split,
        given.tokenizer,
        policy=given.policy,
        more=(*given.keep, *([given.order_by] if given.order_by else [])),
        sample_by=given.sample_by,
        max_record=given.max_record,
        lenient=given.on_error != "stop",
    )
    inputs = Unchanged(records.all_files())
    source = EncodedRecords.of(
        records,
        given.tokenizer,
        given.policy,
        trust_remote_code=given.trust_remote_code,
        lenient=given.on_error != "stop",
    )
    source.encoder.carried = given.keep
    source.encoder.limit(given.max_record)
    OUT.print(source.describe(), highlight=False)
    if isinstance(records, Mixed):
        for name, share in records.left_over().items():
            warn(f"about {share:.0%} of {name} is not read: by the weights another data set ends first")
    size = records.size()
    rules = Rules(
        given.capacity,
        given.overflow,
        given.packing,
        given.seed,
        given.block_size or unit_size(size, given.capacity, records),
        "uint16" if source.encoder.entries <= 1 << 16 else "int32",
        given.keep,
        rule.context,
        rule.min_piece,
        given.max_segments,
        given.order,
        given.order_by,
        given.rows_per_step,
    )
    run = {
        "kind": "run",
        "crosspack": version("crosspack"),
        "data": records.state(),
        "split": given.split,
        "sample_by": given.sample_by,
        "max_record": given.max_record,
        "tokenizer": _digest_of(source.encoder.tokenizer),
        "policy": asdict(given.policy),
        "rules": asdict(rules),
        "format": given.form,
        "rows_per_file": given.rows_per_file,
        "part": list(part),
    }
    return Job(
        records.name,
        list(records.stretches(rules.size)),
        size,
        source.encoder,
        source.tokenizer,
        source.encoder.describe(),
        rules,
        given.form,
        given.rows_per_file,
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
def _pool(given: PackOptions, worker: Worker, jobs: int, size: int) -> Iterator[tuple[Pool, int]]:
    """Yields the pool that runs the jobs, and how many it runs at a time."""
    count = min(given.workers or cores(), jobs)
    if given.engine == "ray":
        from crosspack.packing.onray import RayPool

        pool = RayPool(worker, given.workers)
        yield pool, pool.count
    elif count <= 1 or (given.workers is None and size < INLINE_BYTES):
        yield Inline(worker), 1
    else:
        with Processes(worker, count) as processes:
            yield processes, count


def pack_data(output: str, given: PackOptions) -> dict[str, Any]:
    """Pack all of the data; returns the manifest."""
    if is_url(output):
        from crosspack.cli.remote import staged

        with staged(output, MANIFEST, overwrite=given.overwrite) as folder:
            return _pack_here(folder, replace(given, overwrite=True), staged=True)
    return _pack_here(Path(output), given)


def _pack_here(folder: Path, given: PackOptions, *, staged: bool = False) -> dict[str, Any]:
    job = open_job(given, Part())
    run_digest = digest(job.run)
    if staged and (folder / MANIFEST).exists():  # what was not uploaded before the run was killed
        manifest = read_json(folder / MANIFEST)
        if manifest["run"] == run_digest:
            return manifest
    with writing(folder, MANIFEST, names=RESULT, overwrite=given.overwrite, run=run_digest) as target:
        if target.finished:
            return read_json(folder / MANIFEST)
        units = units_folder(target, job)
        with _progress(job, given) as seen:
            run = make_units(target, job, given, Part(), units, seen)
            manifest = finish_job(target, run, given, job, lambda key: units)
        target.publish()
    return manifest


def pack_part(output: str, given: PackOptions, part: Part) -> dict[str, Any]:
    """Do one part of the work, in a folder of its own inside the output; returns its result."""
    if is_url(output):
        raise PackingError("--part: pass an --output that all parts share, on a network file system")
    job = open_job(given, part)
    folder = Path(output) / f"{PART}{part.number + 1:05d}-of-{part.parts:05d}"
    with writing(folder, PART_FILE, names=("units/*",), overwrite=given.overwrite, run=digest(job.run)) as target:
        if target.finished:
            return read_json(folder / PART_FILE)
        with _progress(job, given) as seen:
            run = make_units(target, job, given, part, units_folder(target, job, in_result=True), seen)
        job.save_tokenizer(target.partial / "tokenizer")
        content = {
            "run": {name: value for name, value in job.run.items() if name != "part"},
            "stretches": len(job.stretches),
            "data": job.name,
            "tokenizer": job.tokenizer,
            "policy": job.policy,
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
    for unfinished in folder.glob(UNFINISHED):
        unfinished.unlink()
    sync(folder.parent)
    target.keep = True  # what is finished counts, whatever happens
    return folder


def _progress(job: Job, given: PackOptions) -> PackProgress:
    return PackProgress(OUT, job.size, given.capacity, given.log)


def make_units(target: Output, job: Job, given: PackOptions, part: Part, units: Path, seen: PackProgress) -> Run:
    """Make all units of a part, or those that an earlier run did not make."""
    assert target.work is not None
    worker = Worker(job.encoder, job.rules, given.on_error, job.form, units, target.partial)
    with journal(target.work / "journal", job.run) as log:
        run = Run(job.stretches, worker, log, part=part, watch=seen.update, inputs=job.inputs)
        if run.resumed:
            OUT.print(f"going on: {run.resumed:,} units are finished", style="dim", highlight=False)
        seen.begin(run.totals)
        jobs = sum(1 for _ in run.jobs(given.workers or cores()))
        try:
            with _pool(given, worker, jobs, job.size) as (pool, count):
                run.make_units(pool, count)
        except BaseException:
            target.keep = bool(run.outcomes)
            raise
    return run


def finish_job(
    target: Output, run: Run, given: PackOptions, job: Job, folder_of: Callable[[Key], Path]
) -> dict[str, Any]:
    """Pack the leftovers and write the files and the manifest."""
    totals, rules = run.totals, job.rules
    if not totals.documents:
        target.keep = False
        raise PackingError("no document has a token to train on: check --data, its columns and --loss")
    assert target.work is not None
    sequence = run.pack_leftovers(folder_of)
    rows_per_file = totals.rows if job.form == "megatron" else job.rows_per_file
    with journal(target.work / "journal", job.run) as log:
        run.journal = log
        files = -(-totals.rows // rows_per_file)
        with _pool(given, replace(run.worker, encoder=None), files, totals.size) as (pool, _):
            run.write_files(pool, sequence, rows_per_file)
    for name, kind in ((NOTES, notes_file), (BAD, bad_file)):
        lines = run.notes(folder_of, kind)
        if (first := next(lines, None)) is not None:
            with open(target.partial / name, "wb") as out:
                out.writelines([first])
                out.writelines(lines)
    if job.form == "mds":
        (target.partial / "index.json").write_text(mds_index(run.files, rules.dtype))
    job.save_tokenizer(target.partial / "tokenizer")
    manifest = {
        "crosspack": version("crosspack"),
        "data": job.name,
        "tokenizer": job.tokenizer,
        "policy": job.policy,
        "capacity": rules.capacity,
        "overflow": rules.overflow,
        "context": rules.context,
        "min_piece": rules.min_piece,
        "max_segments": rules.max_segments,
        "packing": rules.packing,
        "order": rules.order,
        "order_by": rules.order_by,
        "equal_cost": rules.equal_step is not None,
        "rows_per_step": rules.equal_step,
        "seed": rules.seed,
        "records": totals.records,
        "bad_records": totals.counts["bad"],
        "documents": totals.documents,
        **{what: totals.counts[what] for what in COUNTS},
        "rows": totals.rows,
        "tokens": totals.tokens,
        "trained_tokens": totals.trained,
        "efficiency": totals.tokens / (totals.rows * rules.capacity),
        "format": job.form,
        "input_ids": rules.dtype,
        "run": digest(job.run),
        "files": [_listed(file) for file in run.files],
    }
    (target.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def _listed(file: Any) -> dict[str, Any]:
    listed = {"name": file.name, "rows": file.rows, "tokens": file.tokens, "sha256": file.sha256}
    return listed | ({"beside": file.beside} if file.beside else {})


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
