"""``crosspack pack``: data sets in, packed files with a manifest out, on every core and resumable.

A row holds ``input_ids``, ``labels`` (unshifted, -100 at first tokens and prompts) and ``seq_lengths``, not padded,
which is what trainers of packed data sets read, and what ``crosspack train --data`` cuts into documents again.
``crosspack.packing`` does the work; here options become a job, and results a manifest.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from crosspack.cli.console import OUT, figures
from crosspack.cli.listing import TEMPORARY, digest
from crosspack.cli.outputs import PART, Output, clean, writing
from crosspack.cli.packjob import (
    BAD,
    MANIFEST,
    NOTES,
    PART_FILE,
    RESULT,
    Job,
    PackOptions,
    finish_job,
    pack_data,
    pack_part,
    read_json,
    units_folder,
)
from crosspack.packing.journal import journal
from crosspack.packing.run import Part, Run, Worker
from crosspack.packing.unit import Key, Outcome, Rules
from crosspack.packing.writers import Format
from packing_core.errors import PackingError, plural
from packing_core.extras import require
from packing_core.planning.rule import RowRule

# what happened to documents that are not whole in the rows: keys of the manifest and of the notes
SAID = {
    "left_out": ("document", "left out, nothing to train on"),
    "truncated": ("document", "truncated"),
    "dropped": ("document", "dropped"),
    "untrained": ("piece", "of long documents left out, nothing to train on"),
}


def pack(
    output: Annotated[str, typer.Option(help="Folder, or URL of one, for the packed files, manifest and tokenizer.")],
    options: PackOptions,
    part: Annotated[str | None, typer.Option(help="K/N: do one part of N, K from 1, to be joined by --merge.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join the parts in --output.")] = False,
) -> None:
    """Write a data set packed, for trainers that read packed rows."""
    require("pyarrow", extra="hf")
    if merge and (options.data or part):
        raise PackingError("--merge joins the parts in --output: pass neither --data nor --part")
    if merge:
        manifest = merge_parts(output, options)
    elif part is not None:
        done = pack_part(output, options, _part(part))
        OUT.print(f"part {part} is done: when all are, pass --merge and --output {output}")
        figures(done)
        return
    else:
        manifest = pack_data(output, options)
    figures(manifest)
    OUT.print(
        f"{plural(manifest['documents'], 'document')}, {plural(manifest['tokens'], 'token')} "
        f"({manifest['trained_tokens']:,} trained) in {plural(manifest['rows'], 'row')} of {manifest['capacity']:,}: "
        f"efficiency {manifest['efficiency']:.2%}"
    )
    for what, (name, happened) in SAID.items():
        if manifest[what]:
            OUT.print(f"{plural(manifest[what], name)} {happened}, see {NOTES}")
    if manifest["bad_records"]:
        OUT.print(f"{plural(manifest['bad_records'], 'record')} could not be used, see {BAD}")
    OUT.print(f"packed: {output}")


def merge_parts(output: str, chosen: PackOptions) -> dict[str, Any]:
    """Join the parts in an output folder: pack their left-over documents, write the files, and delete the parts.

    A part is a folder of finished units. What they handed on is packed all together, so the result is that of one
    machine that made all units: the same bytes. Where an earlier call was killed while it deleted the parts, only the
    rest of that is done.

    Raises:
        PackingError: a part is missing, or was made of other data or with other options.
    """
    folder = Path(output)
    parts = {path: _part_of(path) for path in sorted(folder.glob(f"{PART}*")) if path.is_dir()}
    if not parts and (folder / MANIFEST).exists():  # they were joined
        clean(folder)
        return read_json(folder / MANIFEST)
    if not parts:
        raise PackingError(f"--merge: {folder} holds no part: run --part 1/N to N/N with this --output first")
    first = next(iter(parts.values()))
    count = first["part"][1]
    if first["run"]["format"] not in get_args(Format):
        raise PackingError(
            f"--merge: the parts are for {first['run']['format']} files, which are written no more: make them again "
            f"with --format {' or '.join(get_args(Format))}"
        )
    for path, content in parts.items():
        if content["run"] != first["run"] or content["part"][1] != count:
            raise PackingError(f"--merge: {path} was made of other data or with other options: make that part again")
    saved = first["run"]["rules"]
    try:
        rules = Rules(**saved | {"rows": RowRule(**saved["rows"]), "keep": tuple(saved["keep"])})
    except (KeyError, TypeError) as error:  # those of another version
        raise PackingError(
            "--merge: the parts are of another version of crosspack, whose settings have other names: "
            "merge them by that version, or make them again"
        ) from error
    job = Job(
        about={name: first[name] for name in ("data", "tokenizer", "policy")},
        stretches=[],
        size=0,
        encoder=None,
        rules=rules,
        run={**first["run"], "merged": count},
        save_tokenizer=lambda target: shutil.copytree(next(iter(parts)) / "tokenizer", target, dirs_exist_ok=True),
    )
    with writing(folder, MANIFEST, names=RESULT, overwrite=chosen.overwrite, run=digest(job.run)) as target:
        manifest = read_json(folder / MANIFEST) if target.finished else _merged(target, parts, chosen, job)
    for path in parts:  # one that is gone in part would look like one that was never complete
        going = folder / f"{TEMPORARY}{path.name.lstrip('.')}"
        path.rename(going)
        shutil.rmtree(going)
    return manifest


def _merged(target: Output, parts: dict[Path, dict[str, Any]], options: PackOptions, job: Job) -> dict[str, Any]:
    count = job.run["merged"]
    missing = sorted(set(range(count)) - {content["part"][0] for content in parts.values()})
    if missing:
        raise PackingError(f"--merge: part {missing[0] + 1}/{count} is not there or not complete: run it first")
    units = units_folder(target, job)
    folders: dict[Key, Path] = {}
    worker = Worker(None, job.rules, options.on_error, job.run["format"], units, target.partial)
    assert target.work is not None
    with journal(target.work / "journal", job.run) as log:
        run = Run(range(next(iter(parts.values()))["stretches"]), worker, log, part=Part())  # type: ignore[arg-type]
    for path, content in parts.items():
        for outcome in (Outcome(**found) for found in content["outcomes"]):
            if outcome.key in folders:
                raise PackingError(f"--merge: {path} and {folders[outcome.key].parent} hold the same unit: remove one")
            folders[outcome.key] = path / "units"
            run.note(outcome)
    manifest = finish_job(target, run, options, job, folders.__getitem__)
    target.publish()
    return manifest


def _part_of(path: Path) -> dict[str, Any]:
    if not (path / PART_FILE).exists():
        number = path.name.removeprefix(PART).replace("-of-", "/")
        raise PackingError(f"--merge: part {number} in {path} is not complete: run it again, it goes on")
    return read_json(path / PART_FILE)


def _part(text: str) -> Part:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise PackingError(f"--part {text}: pass K/N with K from 1 to N: --part 3/64")
    return Part(int(number) - 1, int(count))
