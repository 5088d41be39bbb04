"""The options that several commands share, and what they open: records, a tokenizer and the encoder between the two."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from crosspack.cli.console import OUT
from crosspack.cli.progress import counted
from crosspack.cli.records import join, open_records, weighted
from crosspack.encoding.keys import key_of
from crosspack.encoding.kinds import Refuse, Where, kind_of, raise_error
from crosspack.encoding.layouts import canonical
from crosspack.encoding.text import Encoder, Loss, Policy, plain_texts
from crosspack.encoding.tokenizer import check_tokenizer, load_tokenizer, train_tokenizer
from crosspack.encoding.tokens import check_length
from crosspack.reading import Records
from crosspack.reading.files import MAX_RECORD
from crosspack.reading.lines import SampleBy
from crosspack.reading.places import BadRecord, Row
from packing_core.errors import PackingError
from packing_core.training.schedule import Document

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="A file, a folder or a URL of either (.jsonl, .json, .csv, .txt, .parquet, .arrow; also .gz, .zst), or a "
        "hub data set. Several: one after the other, or mixed by weight, FILE:0.3. Default: the docstrings of the "
        "Python standard library, as questions and answers.",
    ),
]
Split = Annotated[str, typer.Option(help="Which split of a folder or a hub data set.")]
TokenizerName = Annotated[
    str | None,
    typer.Option("--tokenizer", help="A folder or a hub name. Default: that of --model, or a byte-level BPE."),
]
LossOn = Annotated[Loss, typer.Option("--loss", help="Train completions and assistant turns only, or every token.")]
Bos = Annotated[
    bool | None, typer.Option("--bos/--no-bos", help="BOS first. Default: as the tokenizer does by itself.")
]
Eos = Annotated[bool | None, typer.Option("--eos/--no-eos", help="EOS last, trained. Default: if there is one.")]
Capacity = Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens a row can hold.")]
OverflowPolicy = Annotated[
    Literal["error", "truncate", "split", "overlap", "restart", "drop"],
    typer.Option("--overflow", help="What to do with a document longer than the capacity."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=0,
        help="Under --overflow overlap and restart: tokens that begin each later piece and are not trained there. "
        "Default: an eighth of the capacity.",
    ),
]
MinPiece = Annotated[
    int, typer.Option("--min-piece", min=1, help="The least tokens of each piece of a document that is cut.")
]
MaxSegments = Annotated[
    int | None, typer.Option("--max-segments", min=1, help="Most documents, or pieces of them, in a row.")
]
Packing = Annotated[
    Literal["mixed", "best_fit"],
    typer.Option("--packing", help="Fill rows with a random mix of lengths, or by length, which is as nearly full."),
]
OrderOfTraining = Annotated[
    Literal["random", "curriculum", "sorted", "grouped"],
    typer.Option(
        "--order",
        help="In which order documents are trained: at random, short ones first, sorted by --order-by, or those of one "
        "--order-by next to each other. Rows follow it up to about 64 of them.",
    ),
]
OrderBy = Annotated[
    str | None, typer.Option("--order-by", help="The column to sort or group by, a number or a text in each record.")
]
EqualCost = Annotated[
    bool,
    typer.Option(
        "--equal-cost",
        help="Make the rows of a step for its ranks, so that they cost the same, where the slowest would take 2% more "
        "than the mean.",
    ),
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let Python code in the model's folder run. Off: refuse such models."),
]

Engine = Literal["local", "ray"]
TextFiles = Literal["line", "document"]

VOCABULARY = 2048  # entries of the byte-level BPE that is trained when no tokenizer is named


@dataclass(frozen=True)
class EncodedRecords:
    """Records and the encoder that turns them into documents; ``tokenizer`` is what tables and manifests call it."""

    records: Records
    encoder: Encoder
    tokenizer: str

    def describe(self) -> str:
        """Describes the data and how they are read, in rich markup, and what was left out, once they are read."""
        lines = [f"[bold]{escape(self.records.name)}[/], tokenizer: {escape(self.tokenizer)}"]
        lines.append(escape(self.encoder.describe()))
        if self.encoder.left_out:
            lines.append(f"{self.encoder.left_out:,} documents have nothing to train on and are left out")
        return "\n".join(lines)

    @staticmethod
    def open(
        data: Sequence[str] | None,
        split: str,
        tokenizer: str | None,
        policy: Policy,
        *,
        trust_remote_code: bool = False,
    ) -> EncodedRecords:
        """Open the data and load the tokenizer, or train one on the data when none is named.

        The names and the first record are checked before a library is imported.
        """
        return EncodedRecords.of(
            check_data(data, split, tokenizer), tokenizer, policy, trust_remote_code=trust_remote_code
        )

    @staticmethod
    def of(
        records: Records,
        tokenizer: str | None,
        policy: Policy,
        *,
        trust_remote_code: bool = False,
        lenient: bool = False,
    ) -> EncodedRecords:
        """The same of records that are open; ``lenient`` trains a tokenizer on the records that can be used."""
        if tokenizer is not None:
            loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
            return EncodedRecords(records, Encoder(loaded, policy), Path(tokenizer).name)
        read = counted(OUT, "records read for the tokenizer", usable(records, policy) if lenient else records)
        texts = plain_texts(read, policy.fields)
        trained = train_tokenizer(texts, VOCABULARY)
        return EncodedRecords(
            records, Encoder(trained, policy), f"byte-level BPE of the data, {len(trained):,} entries"
        )

    def holds_chats(self) -> bool:
        """Returns whether the first record that can be used is a chat."""
        first = next(usable(self.records, self.encoder.policy), None)
        fields = self.encoder.policy.fields
        return first is not None and kind_of(canonical(first, first.where, fields), first.where) == "messages"

    def documents(
        self,
        capacity: int,
        overflow: str,
        left_out: Callable[[Where, int], None] | None = None,
        *,
        key: str | None = None,
        skip: Refuse | None = None,
    ) -> Iterator[Document]:
        """The documents; one longer than the capacity is an error that names its place if ``overflow`` is ``error``.

        Args:
            capacity, overflow: as in ``packing_core.plan``.
            left_out: is called with the place and the tokens of each document that has nothing to train on.
            key: the column that holds the key of each document.
            skip: is called with each record that cannot be used, in place of an error.

        Raises:
            CapacityError: a document is too long.
            PackingError: a record has no key that is a number or a text.
        """
        records = self.records if skip is None else _usable(self.records, skip)
        for found in self.encoder.encoded(records, skip or raise_error, left_out):
            if overflow == "error":
                check_length(str(found.where), found.document, capacity)
            yield found.document if key is None else found.document._replace(key=key_of(found.where, found.record, key))


def _usable(records: Records, skip: Refuse) -> Iterator[Row]:
    """The records that can be read; ``skip`` is called with the others."""
    for item in records.items():
        if isinstance(item, BadRecord):
            skip(item, item.error())
        else:
            yield item


def option_of_split(option: str) -> str:
    """The option that names a split of what ``option`` names: ``--eval-split`` for ``--eval-data``."""
    return option.removesuffix("data") + "split"


def check_data(
    data: Sequence[str] | None,
    split: str | None,
    tokenizer: str | None = None,
    *,
    option: str = "--data",
    policy: Policy | None = None,
    more: Iterable[str] = (),
    sample_by: SampleBy = "line",
    max_record: int = MAX_RECORD,
    lenient: bool = False,
) -> Records:
    """Open all of the data and look at the first record of each; imports no framework for local files.

    Args:
        data: data sets, which are read one after the other, or mixed if they have weights.
        split: of each; None for a file, or the split ``validation``.
        tokenizer: what ``--tokenizer`` names.
        option: the option that names the data, for errors.
        policy: says which columns are read.
        more: other columns that are read.
        sample_by, max_record: as of :func:`crosspack.read`.
        lenient: look at the first record that can be used.

    Raises:
        PackingError: the data or the tokenizer is nowhere, or the data has no records that can be read.
    """
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    policy = policy or Policy()
    sources, firsts = [], []
    try:
        for name, weight in map(weighted, data) if data else [(None, None)]:
            columns = (*policy.columns, *more)
            records = open_records(name, split=split, columns=columns, sample_by=sample_by, max_record=max_record)
            sources.append((records, weight))
            firsts.append(next(usable(records, policy) if lenient else iter(records), None))
        joined = join(sources)
    except PackingError as error:
        text = str(error).replace("--data", option)
        named = re.sub(r"\b(leave|pass another|as) split\b", rf"\1 {option_of_split(option)}", text)
        raise type(error)(named) from error
    for (records, _), first in zip(sources, firsts, strict=True):
        if first is None:
            what = "records that can be used" if lenient else "records"
            raise PackingError(f"{option} {records.name} has no {what}: check the file and {option_of_split(option)}")
        kind_of(canonical(first, first.where, policy.fields), first.where)
    return joined


def usable(records: Records, policy: Policy) -> Iterator[Row]:
    """The records that hold a text or token ids; what is wrong with others is said where they are packed."""
    for item in records.items():
        if isinstance(item, BadRecord):
            continue
        with suppress(PackingError):
            if kind_of(canonical(item, item.where, policy.fields), item.where) != "input_ids":
                list(plain_texts([item], policy.fields))
            yield item
