"""``crosspack pack``: data sets in, packed files with a manifest out, on every core and resumable.

A row holds ``input_ids``, ``labels`` (unshifted, -100 at first tokens and prompts) and ``seq_lengths``, not padded,
which is what trainers of packed data sets read, and what ``crosspack train --data`` cuts into documents again.
``crosspack.packing`` does the work; here options become a job, and results a manifest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from crosspack.cli.console import OUT, figures
from crosspack.cli.packjob import BAD, NOTES, PackOptions, pack_data, pack_part
from crosspack.cli.packmerge import merge_parts
from crosspack.packing.run import Part
from packing_core.errors import PackingError, plural
from packing_core.extras import require

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


def _part(text: str) -> Part:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise PackingError(f"--part {text}: pass K/N with K from 1 to N: --part 3/64")
    return Part(int(number) - 1, int(count))
