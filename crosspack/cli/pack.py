"""``crosspack pack``: data sets in, packed files with a manifest out, on every core and resumable.

A row holds ``input_ids``, ``labels`` (unshifted, -100 at first tokens and prompts) and ``seq_lengths``, not padded,
which is what trainers of packed data sets read, and what ``crosspack train --data`` cuts into documents again.
``crosspack.packing`` does the work; here options become a job, and results a manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from crosspack.cli import options
from crosspack.cli.console import OUT, figures
from crosspack.cli.packjob import BAD, NOTES, PackOptions, pack_data, pack_part
from crosspack.cli.packmerge import merge_parts
from crosspack.encoding.text import Policy
from crosspack.packing.run import Part
from crosspack.packing.unit import OnError
from crosspack.packing.writers import Format
from crosspack.reading.files import to_size
from packing_core.errors import PackingError, plural
from packing_core.extras import require

# what happened to documents that are not whole in the rows: keys of the manifest and of the notes
SAID = {
    "left_out": "documents left out, nothing to train on",
    "truncated": "documents truncated",
    "dropped": "documents dropped",
    "untrained": "pieces of long documents left out, nothing to train on",
}


def _column(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-column", help=f"The column that holds {what}; other columns do not count then.")


def pack(
    output: Annotated[str, typer.Option(help="Folder, or URL of one, for the packed files, manifest and tokenizer.")],
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "error",
    context: options.Context = None,
    min_piece: options.MinPiece = 1,
    max_segments: options.MaxSegments = None,
    packing: options.Packing = "mixed",
    order: options.OrderOfTraining = "random",
    order_by: options.OrderBy = None,
    equal_cost: options.EqualCost = False,
    rows_per_step: Annotated[
        int | None,
        typer.Option("--rows-per-step", min=1, help="With --equal-cost: consecutive rows that are trained together."),
    ] = None,
    format: Annotated[Format, typer.Option(help="Of the packed files.")] = "parquet",
    rows_per_file: Annotated[int, typer.Option(min=1, help="Rows after which a new file begins.")] = 65_536,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")] = None,
    engine: Annotated[
        options.Engine, typer.Option(help="Run the workers here, or on the Ray cluster that RAY_ADDRESS names.")
    ] = "local",
    on_error: Annotated[
        OnError, typer.Option("--on-error", help="A record that cannot be used: stop, skip it, or keep it in a file.")
    ] = "stop",
    max_record: Annotated[
        str, typer.Option("--max-record", help="Bytes that a record may take, decompressed; a longer one is an error.")
    ] = "64MB",
    part: Annotated[str | None, typer.Option(help="K/N: do one part of N, K from 1, to be joined by --merge.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join the parts in --output.")] = False,
    keep: Annotated[list[str] | None, typer.Option(help="A column that the packed files keep; also `where`.")] = None,
    text_column: Annotated[str | None, _column("text", "the text")] = None,
    prompt_column: Annotated[str | None, _column("prompt", "prompts")] = None,
    completion_column: Annotated[str | None, _column("completion", "completions")] = None,
    messages_column: Annotated[str | None, _column("messages", "chats")] = None,
    tokens_column: Annotated[str | None, _column("tokens", "token ids")] = None,
    text_files: Annotated[
        options.TextFiles, typer.Option("--text-files", help="Each line of a text file is a document, or the file.")
    ] = "line",
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Bytes of input that a worker packs at once. Default: by the size.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="A file to which progress is added, a line every ten seconds.")
    ] = None,
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    seed: options.Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write a data set packed, for trainers that read packed rows."""
    require("pyarrow", extra="hf")
    named = {
        "text": text_column,
        "prompt": prompt_column,
        "completion": completion_column,
        "messages": messages_column,
        "input_ids": tokens_column,
    }
    given = PackOptions(
        data=tuple(data or ()),
        split=split,
        tokenizer=tokenizer,
        policy=Policy(loss, bos, eos, tuple((name, column) for name, column in named.items() if column is not None)),
        capacity=capacity,
        overflow=overflow,
        context=context,
        min_piece=min_piece,
        max_segments=max_segments,
        packing=packing,
        order=order,
        order_by=order_by,
        equal_cost=equal_cost,
        rows_per_step=rows_per_step,
        form=format,
        rows_per_file=rows_per_file,
        keep=tuple(keep or ()),
        sample_by=text_files,
        block_size=block_size,
        seed=seed,
        workers=workers,
        engine=engine,
        on_error=on_error,
        max_record=to_size(max_record),
        log=log,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
    )
    if merge and (data or part):
        raise PackingError("--merge joins the parts in --output: pass neither --data nor --part")
    if merge:
        manifest = merge_parts(output, given)
    elif part is not None:
        done = pack_part(output, given, _part(part))
        OUT.print(f"part {part} is done: when all are, pass --merge and --output {output}", highlight=False)
        figures(done)
        return
    else:
        manifest = pack_data(output, given)
    figures(manifest)
    OUT.print(
        f"{plural(manifest['documents'], 'document')}, {plural(manifest['tokens'], 'token')} "
        f"({manifest['trained_tokens']:,} trained) in {plural(manifest['rows'], 'row')} of {manifest['capacity']:,}: "
        f"efficiency {manifest['efficiency']:.2%}",
        highlight=False,
    )
    for what, said in SAID.items():
        if manifest[what]:
            OUT.print(f"{manifest[what]:,} {said}, see {NOTES}", highlight=False)
    if manifest["bad_records"]:
        OUT.print(f"{plural(manifest['bad_records'], 'record')} could not be used, see {BAD}", highlight=False)
    OUT.print(f"packed: {output}", highlight=False)


def _part(text: str) -> Part:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise PackingError(f"--part {text}: pass K/N with K from 1 to N: --part 3/64")
    return Part(int(number) - 1, int(count))
