"""The options that several commands share, and what they open: records, a tokenizer and the encoder between the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.markup import escape

from crosspack.cli.console import OUT
from crosspack.cli.models import check_rows_of
from crosspack.cli.progress import counted
from crosspack.cli.records import join, open_records, option_of_split, weighted
from crosspack.encoding.kinds import kind_of_row
from crosspack.encoding.layouts import LOOKED_AT
from crosspack.encoding.text import Encoder, Loss, Policy, plain_texts
from crosspack.encoding.tokenizer import check_tokenizer, load_tokenizer, train_tokenizer
from crosspack.reading import Records
from crosspack.reading.files import MAX_RECORD
from crosspack.reading.lines import SampleBy
from crosspack.reading.places import Row, strictly
from packing_core.errors import PackingError, plural
from packing_core.planning.pieces import Overflow
from packing_core.planning.rule import RowRule

Split = Annotated[str, typer.Option(help="Which split of a folder or a hub data set.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let Python code in the model's folder run. Off: refuse such models."),
]
LossOn = Annotated[Loss, typer.Option("--loss", help="Train completions and assistant turns only, or every token.")]
OverflowPolicy = Annotated[
    Overflow, typer.Option("--overflow", help="What to do with a document longer than the capacity.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes that tokenise. Default: one for each core.")
]


Filled = TypeVar("Filled")


def filled(kind: type[Filled], options: object, /, **others: Any) -> Filled:
    """Makes a dataclass of the options that have the names of its fields, and of ``others``, which replace them."""
    fields_of_kind: Any = kind
    named = {entry.name for entry in fields(fields_of_kind)} - others.keys()
    return kind(**{name: getattr(options, name) for name in named if hasattr(options, name)}, **others)


@dataclass(frozen=True)
class DataOptions:
    """Selects the records that are read, and their tokenizer."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file, a folder or a URL of either (.jsonl, .json, .csv, .txt, .parquet, .arrow; also .gz, .zst), "
            "or a hub data set. Several: one after the other, or mixed by weight, FILE:0.3. Default: the docstrings of "
            "the Python standard library, as questions and answers.",
        ),
    ] = None
    split: Split = "train"
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="A folder or a hub name. Default: that of --model, or a byte-level BPE."),
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class ModelOptions:
    """Selects the model, the device and the attention."""

    model: Annotated[
        str | None,
        typer.Option(help="A folder, a hub name, or a config.json (random weights). Default: a small random Llama."),
    ] = None
    device: Annotated[str, typer.Option(help="What the backend calls the device; auto takes the fastest.")] = "auto"
    attention: Annotated[str, typer.Option(help="Attention implementation of the packed run.")] = "auto"

    @property
    def name(self) -> str:
        """Names the model for people."""
        return self.model or "a small Llama, random weights"


@dataclass(frozen=True)
class TokenOptions:
    """Says which tokens documents get and which of them are trained."""

    loss: LossOn = "completion"
    bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="BOS first. Default: as the tokenizer does by itself.")
    ] = None
    eos: Annotated[bool | None, typer.Option("--eos/--no-eos", help="EOS last, trained. Default: if there is one.")] = (
        None
    )

    @property
    def policy(self) -> Policy:
        """The rules for tokens, and the columns that are read."""
        return Policy(self.loss, self.bos, self.eos, self.named_columns)

    @property
    def named_columns(self) -> tuple[tuple[str, str], ...]:
        """Pairs of what is read and the column that holds it, as ``Policy.fields``."""
        return ()


@dataclass(frozen=True)
class CapacityOptions:
    """Says how long rows are, and seeds what is random."""

    capacity: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens a row can hold.")] = 2048
    overflow: OverflowPolicy = "error"
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0


@dataclass(frozen=True)
class PlanOptions(CapacityOptions):
    """Says how documents become rows."""

    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=0,
            help="Under --overflow overlap and restart: tokens that begin each later piece and are not trained there. "
            "Default: an eighth of the capacity.",
        ),
    ] = None
    min_piece: Annotated[
        int, typer.Option("--min-piece", min=1, help="The least tokens of each piece of a document that is cut.")
    ] = 1
    max_segments: Annotated[
        int | None, typer.Option("--max-segments", min=1, help="Most documents, or pieces of them, in a row.")
    ] = None
    packing: Annotated[
        Literal["mixed", "best_fit"],
        typer.Option(
            "--packing", help="Fill rows with a random mix of lengths, or by length, which is as nearly full."
        ),
    ] = "mixed"

    def row_rule(self) -> RowRule:
        """Returns the rule of these options.

        Raises:
            PackingError: they contradict each other.
        """
        return filled(RowRule, self, strategy=self.packing)


@dataclass(frozen=True)
class OrderOptions(PlanOptions):
    """Says how documents become rows, in which order, and of which cost."""

    order: Annotated[
        Literal["random", "curriculum", "sorted", "grouped"],
        typer.Option(
            "--order",
            help="In which order documents are trained: at random, short ones first, sorted by --order-by, or those of "
            "one --order-by next to each other. Rows follow it up to about 64 of them.",
        ),
    ] = "random"
    order_by: Annotated[
        str | None,
        typer.Option("--order-by", help="The column to sort or group by, a number or a text in each record."),
    ] = None
    equal_cost: Annotated[
        bool,
        typer.Option(
            "--equal-cost",
            help="Make the rows of a step for its ranks, so that they cost the same, where the slowest would take 2% "
            "more than the mean.",
        ),
    ] = False

    def row_rule(self) -> RowRule:
        """Returns the rule of these options; its keys are the column of ``--order-by``."""
        if self.equal_cost and self.packing != "mixed":
            raise PackingError(f"--equal-cost chooses the rows of a step by cost: leave --packing {self.packing} out")
        return filled(RowRule, self, strategy=self.packing, keys=self.order_by)

    def check_step(self, rows: int | None) -> None:
        """Refuses steps of equal cost of one row or of unknown rows, and rows of a step that has no effect."""
        if self.equal_cost and rows is None:
            raise PackingError("--equal-cost needs --rows-per-step, how many rows of the files are trained together")
        if self.equal_cost and rows == 1:
            raise PackingError("--equal-cost evens the rows of a step, and --rows-per-step 1 gives it one: pass more")
        if rows is not None and not self.equal_cost:
            raise PackingError(f"--rows-per-step {rows} has no effect without --equal-cost: pass both or neither")


VOCABULARY = 2048  # entries of the byte-level BPE that is trained when no tokenizer is named


@dataclass(frozen=True)
class EncodedRecords:
    """Records and the encoder that turns them into documents; ``tokenizer`` is what tables and manifests call it."""

    records: Records
    encoder: Encoder
    tokenizer: str

    def __post_init__(self) -> None:
        check_rows_of(self.records, self.encoder.tokenizer)

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding token, or 0."""
        token: int | None = self.encoder.tokenizer.pad_token_id
        return token or 0

    def describe(self) -> str:
        """Describes the data and how they are read, in rich markup, and what was left out, once they are read."""
        lines = [f"[bold]{escape(self.records.name)}[/], tokenizer: {escape(self.tokenizer)}"]
        lines.append(escape(self.encoder.describe()))
        if self.encoder.left_out:
            lines.append(f"left out, nothing to train on: {plural(self.encoder.left_out, 'document')}")
        return "\n".join(lines)

    @staticmethod
    def of(
        records: Records,
        tokenizer: str | None,
        policy: Policy,
        *,
        trust_remote_code: bool = False,
        lenient: bool = False,
    ) -> EncodedRecords:
        """Load the tokenizer, or train one on the records, of which ``lenient`` takes those that can be used."""
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
        return first is not None and kind_of_row(first, self.encoder.policy.fields) == "messages"


def check_data(
    data: Sequence[str] | None,
    split: str | None,
    tokenizer: str | None = None,
    *,
    option: str = "--data",
    policy: Policy | None = None,
    more: Iterable[str] = (),
    keep: Iterable[str] = (),
    sample_by: SampleBy = "line",
    max_record: int = MAX_RECORD,
    lenient: bool = False,
) -> Records:
    """Open all of the data and look at the first record of each; imports no framework for local files.

    Args:
        split: of each; None for a file, or the split ``validation``.
        tokenizer: what ``--tokenizer`` names.
        keep: columns that ``--keep`` names, of which the first records must have each.
        sample_by, max_record: as of :func:`crosspack.read`.
        lenient: look at the first record that can be used.

    Raises:
        PackingError: the data or the tokenizer is nowhere, or the data has no records that can be read.
    """
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    policy = policy or Policy()
    columns = (*policy.columns, *more, *keep)
    named: list[Any] = [weighted(text, option) for text in data] if data else [(None, None)]
    limits: dict[str, Any] = {"sample_by": sample_by, "max_record": max_record}
    sources = [(open_records(x, split=split, option=option, columns=columns, **limits), weight) for x, weight in named]
    firsts = [next(usable(records, policy) if lenient else iter(records), None) for records, _ in sources]
    joined = join(sources, option)
    for (records, _), first in zip(sources, firsts, strict=True):
        if first is None:
            what = "records that can be used" if lenient else "records"
            raise PackingError(f"{option} {records.name} has no {what}: check the file and {option_of_split(option)}")
        kind_of_row(first, policy.fields)
    _check_columns((records for records, _ in sources), {*keep} - {"where"}, policy)
    return joined


def _check_columns(sources: Iterable[Records], keep: set[str], policy: Policy) -> None:
    """Raises PackingError if none of the first records of all data sets has one of the columns of ``--keep``."""
    seen: dict[str, None] = {}
    for records in sources:
        if keep <= seen.keys():
            return
        for record in islice(usable(records, policy), LOOKED_AT):
            seen.update(dict.fromkeys(record))
    if absent := sorted(keep - seen.keys()):
        near = get_close_matches(absent[0], seen, n=1)
        hint = f"is it {near[0]}?" if near else f"they have {', '.join(seen)}"
        raise PackingError(f"--keep {absent[0]}: none of the first {LOOKED_AT} records has it: {hint}")


def usable(records: Records, policy: Policy) -> Iterator[Row]:
    """The records that hold a text or token ids; what is wrong with others is said where they are packed."""
    for item in strictly(records.items(), lambda _: None):
        with suppress(PackingError):
            if kind_of_row(item, policy.fields) != "input_ids":
                list(plain_texts([item], policy.fields))
            yield item
