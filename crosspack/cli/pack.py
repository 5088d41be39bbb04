"""``crosspack pack``: a data set in, packed Parquet or Arrow files with a manifest out, in bounded memory.

Records are read, encoded and packed as they come, and rows are written as they fill. A row holds ``input_ids``,
``labels`` (unshifted, -100 at first tokens and prompts) and ``seq_lengths``, without padding, which is what trainers
that take packed data sets read, and what ``crosspack train --data`` cuts into documents again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from crosspack.cli import options
from crosspack.cli.console import figures
from crosspack.cli.fit import Fit
from crosspack.cli.options import OUT, Source
from crosspack.cli.outputs import writing
from crosspack.cli.progress import counted
from crosspack.cli.text import Policy
from packing_core.batch import PackedBatch
from packing_core.errors import PackingError, plural
from packing_core.extras import require
from packing_core.stream import stream

MANIFEST, NOTES = "manifest.json", "incomplete.jsonl"
# what happened to documents that are not whole in the rows: keys of the manifest and of the notes
SAID = {
    "left_out": "documents left out, nothing to train on",
    "truncated": "documents truncated",
    "dropped": "documents dropped",
    "untrained": "pieces of long documents left out, nothing to train on",
}
Format = Literal["parquet", "arrow"]


def pack(
    output: Annotated[Path, typer.Option(help="Folder for the packed files, the manifest and the tokenizer.")],
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "error",
    packing: options.Packing = "mixed",
    format: Annotated[Format, typer.Option(help="Of the packed files.")] = "parquet",
    rows_per_file: Annotated[int, typer.Option(min=1, help="Rows after which a new file begins.")] = 65_536,
    buffer: Annotated[int, typer.Option(min=1, max=1 << 24, help="Documents held back to fill rows with.")] = 8192,
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    seed: options.Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write a data set packed, for trainers that read packed rows."""
    require("pyarrow", extra="hf")
    with writing(output, MANIFEST, names=(NOTES, "train-*", "tokenizer/*"), overwrite=overwrite) as target:
        source = Source.open(data, split, tokenizer, Policy(loss, bos, eos), trust_remote_code=trust_remote_code)
        encoder = source.encoder
        written = _Files(target.partial, format, rows_per_file)
        with open(target.partial / NOTES, "w") as notes:
            fit = Fit(capacity, overflow, notes)
            encoder.on_left_out = lambda where, tokens: fit.note("left_out", where, tokens)
            documents = counted(OUT, "documents packed", encoder.located(source.records))
            for block in fit.blocks(documents):
                for chunk in stream(_once(block), capacity, buffer=buffer, strategy=packing, seed=seed).chunks():
                    written.write(chunk)
        written.close()
        if not fit.documents:
            raise PackingError("no document has a token to train on: check --data, its columns and --loss")
        if not fit.counts:
            (target.partial / NOTES).unlink()
        encoder.tokenizer.save_pretrained(target.partial / "tokenizer")
        manifest = {
            "crosspack": version("crosspack"),
            "data": source.records.name,
            "tokenizer": source.tokenizer,
            "policy": encoder.describe(),
            "capacity": capacity,
            "overflow": overflow,
            "packing": packing,
            "seed": seed,
            "documents": fit.documents,
            **{what: fit.counts[what] for what in SAID},
            "rows": written.rows,
            "tokens": written.tokens,
            "trained_tokens": written.trained,
            "efficiency": written.tokens / (written.rows * capacity),
            "files": [asdict(file) for file in written.files],
        }
        (target.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        target.publish()
    figures(manifest)
    OUT.print(
        f"{plural(fit.documents, 'document')}, {plural(written.tokens, 'token')} ({written.trained:,} trained) in "
        f"{plural(written.rows, 'row')} of {capacity:,}: efficiency {written.tokens / (written.rows * capacity):.2%}",
        highlight=False,
    )
    for what, said in SAID.items():
        if fit.counts[what]:
            OUT.print(f"{fit.counts[what]:,} {said}, see {NOTES}", highlight=False)
    OUT.print(f"packed: {output}", highlight=False)


def _once(documents: Iterator[Any]) -> Callable[[int], Iterator[Any]]:
    """A source that a stream can read once."""
    return lambda start: islice(documents, start, None)


@dataclass
class _File:
    """One finished file, as the manifest lists it."""

    name: str
    rows: int = 0
    tokens: int = 0
    sha256: str = ""


@dataclass
class _Files:
    """Writes packed rows to files of at most ``rows_per_file`` rows, and counts."""

    folder: Path
    format: Format
    rows_per_file: int
    files: list[_File] = field(default_factory=list)
    trained: int = 0
    _writer: Any = None

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    def write(self, batch: PackedBatch) -> None:
        """Append the rows of a batch."""
        self.trained += int(np.count_nonzero(batch.targets != -100))
        begin = 0
        while begin < len(batch):
            if self._writer is None or self.files[-1].rows == self.rows_per_file:
                self.close()
                self.files.append(_File(f"train-{len(self.files):05d}.{self.format}"))
            part = batch[begin : begin + self.rows_per_file - self.files[-1].rows]
            table = _table(part)
            if self._writer is None:
                self._writer = _writer(self.folder / self.files[-1].name, self.format, table.schema)
            self._writer.write_table(table)
            self.files[-1].rows += len(part)
            self.files[-1].tokens += part.n_tokens
            begin += len(part)

    def close(self) -> None:
        """Finish the file that is being written."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        with open(self.folder / self.files[-1].name, "rb") as written:
            self.files[-1].sha256 = hashlib.file_digest(written, "sha256").hexdigest()


def _table(batch: PackedBatch) -> Any:
    """The rows as an Arrow table of lists, padding left out."""
    pyarrow = require("pyarrow", extra="hf")
    real = batch.attention_mask

    def lists(values: Any, counts: Any) -> Any:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int32)
        return pyarrow.ListArray.from_arrays(offsets, values.astype(np.int32))

    return pyarrow.table(
        {
            "input_ids": lists(batch.input_ids[real], real.sum(axis=1)),
            "labels": lists(batch.targets[real], real.sum(axis=1)),
            "seq_lengths": lists(batch.lengths, np.bincount(batch.rows, minlength=len(batch))),
        }
    )


def _writer(path: Path, format: Format, schema: Any) -> Any:
    if format == "parquet":
        return require("pyarrow.parquet", extra="hf").ParquetWriter(path, schema)
    return require("pyarrow", extra="hf").ipc.new_stream(path, schema)
