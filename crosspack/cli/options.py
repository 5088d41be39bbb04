"""The options that several commands share, and what they open: records, a tokenizer and the encoder between the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from crosspack.cli.console import OUT
from crosspack.cli.progress import counted
from crosspack.cli.records import Records, open_records
from crosspack.cli.text import Encoder, Loss, Policy, load_tokenizer, plain_texts, train_tokenizer
from packing_core.errors import PackingError

Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="A .jsonl, .parquet or .arrow file, a folder of them, or a hub data set, with text, prompt + completion "
        "or messages columns. Default: the docstrings of the Python standard library, as questions and answers.",
    ),
]
Split = Annotated[str, typer.Option(help="Which split of a folder or a hub data set.")]
TokenizerName = Annotated[
    str | None,
    typer.Option("--tokenizer", help="A folder or a hub name. Default: the model's, or a byte-level BPE of the data."),
]
LossOn = Annotated[Loss, typer.Option("--loss", help="Train completions and assistant turns only, or every token.")]
Bos = Annotated[
    bool | None, typer.Option("--bos/--no-bos", help="BOS first. Default: as the tokenizer does by itself.")
]
Eos = Annotated[bool | None, typer.Option("--eos/--no-eos", help="EOS last, trained. Default: if there is one.")]
Capacity = Annotated[int, typer.Option(min=1, help="Tokens a row can hold.")]
OverflowPolicy = Annotated[
    Literal["error", "truncate", "split", "drop"],
    typer.Option("--overflow", help="What to do with a document longer than the capacity."),
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let Python code in the model's folder run. Off: refuse such models."),
]

VOCABULARY = 2048  # entries of the byte-level BPE that is trained when no tokenizer is named


def check_folder(folder: Path, marker: str, *, overwrite: bool, ways: str = "--overwrite") -> None:
    """Raise unless ``folder`` may be written: it is empty, or holds a run of ours that ``overwrite`` lets us replace.

    Args:
        folder: where a command is about to write.
        marker: the file that every run of this command leaves in its folder.
        overwrite: whether the user gave that option.
        ways: the options that the error offers.

    Raises:
        PackingError: somebody may still need what the folder holds.
    """
    held = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if held <= {marker}:
        return
    if not overwrite:
        raise PackingError(f"--output {folder} is not empty: pass {ways} or another folder")
    if marker not in held:
        raise PackingError(f"--overwrite: {folder} has no {marker}, so it holds something else: remove it yourself")


@dataclass(frozen=True)
class Source:
    """Records and the encoder that turns them into documents; ``tokenizer`` is what tables and manifests call it."""

    records: Records
    encoder: Encoder
    tokenizer: str

    def describe(self) -> str:
        """What is read and how, in rich markup; says what was left out once the records were read."""
        lines = [f"[bold]{escape(self.records.name)}[/], tokenizer: {escape(self.tokenizer)}"]
        lines.append(escape(self.encoder.describe()))
        if self.encoder.left_out:
            lines.append(f"{self.encoder.left_out:,} records have nothing to train on and are left out")
        return "\n".join(lines)

    @staticmethod
    def open(
        data: str | None, split: str, tokenizer: str | None, policy: Policy, *, trust_remote_code: bool = False
    ) -> Source:
        """Open the data and load the tokenizer, or train one on the data when none is named."""
        records = open_records(data, split=split)
        if tokenizer is not None:
            loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
            return Source(records, Encoder(loaded, policy), Path(tokenizer).name)
        texts = plain_texts(counted(OUT, "records read for the tokenizer", records))
        trained = train_tokenizer(texts, VOCABULARY)
        return Source(records, Encoder(trained, policy), f"byte-level BPE of the data, {len(trained):,} entries")
