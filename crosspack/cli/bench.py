"""``crosspack bench``: what packing gains for one model, data set and machine, measured in about a minute.

Options become a TrainJob whose steps hold one row; the backend (the entry point group ``crosspack.benches``) measures
each way to train on it; here are the table, the JSON and the exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from crosspack.cli.console import OUT, figures
from crosspack.cli.documents import documents_together
from crosspack.cli.models import SMALL_LLAMA, model_source, special_tokens, tokenizer_source
from crosspack.cli.options import (
    CapacityOptions,
    DataOptions,
    EncodedRecords,
    LossOn,
    ModelOptions,
    OverflowPolicy,
    Workers,
    check_data,
    filled,
)
from crosspack.cli.tables import lengths_table, warn_if_busy
from crosspack.encoding.text import Policy
from packing_core.errors import ContaminationError, PackingError, plural
from packing_core.extras import loaded, registered
from packing_core.planning.plan import plan as make_plan
from packing_core.planning.rule import RowRule
from packing_core.training.job import Measured, TrainJob
from packing_core.training.options import Options
from packing_core.training.schedule import Corpus, Schedule

GROUP = "crosspack.benches"
Race = Callable[[TrainJob, float], Iterator[Measured]]


@dataclass(frozen=True)
class BenchOptions(CapacityOptions, ModelOptions, DataOptions):
    """The options of ``crosspack bench``."""

    overflow: OverflowPolicy = "truncate"
    padded_batch: Annotated[int, typer.Option(min=1, help="Documents in a padded batch.")] = 8
    seconds: Annotated[float, typer.Option(min=0.0, help="Of training steps for each of 4 ways.")] = 10
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the forward pass.")] = "float32"
    backend: Annotated[str, typer.Option(help="Which installed backend measures.")] = "torch"
    loss: LossOn = "completion"
    workers: Workers = None


def bench(options: BenchOptions) -> None:
    """Measure padded, stock packed and crosspack training of your model on your data and your machine."""
    entry = registered(GROUP, options.backend)
    built_from = model_source(options.model)
    options = replace(options, tokenizer=tokenizer_source(options.model, options.tokenizer))
    records = check_data(options.data, options.split, options.tokenizer)
    race: Race = loaded(entry, extra=options.backend)
    source = EncodedRecords.of(
        records, options.tokenizer, Policy(options.loss), trust_remote_code=options.trust_remote_code
    )
    if options.model is None:
        built_from = SMALL_LLAMA | special_tokens(source.encoder.tokenizer)
    rule = filled(RowRule, options)
    corpus = Corpus.collect(documents_together(source, rule, workers=options.workers))
    planned = make_plan(corpus.documents.lengths, rule, seed=options.seed)
    schedule = Schedule(corpus, (planned,), 1, options.padded_batch, seed=options.seed, pad_id=source.pad_id)
    OUT.print(f"[bold]{escape(options.name)}[/] on {source.describe()}")
    OUT.print(lengths_table(corpus.documents.lengths, trained=corpus.n_trained))
    OUT.print(f"rows of {options.capacity:,}: {planned.n_rows:,}, {planned.efficiency:.1%} real tokens")
    job = TrainJob(
        model=built_from,
        schedule=schedule,
        options=Options(lr=1e-5, precision=options.precision, seed=options.seed),
        runs=("padded", "packed"),
        device=options.device,
        attention=options.attention,
        trust_remote_code=options.trust_remote_code,
        on_phase=lambda line: OUT.print(line, style="dim"),
    )
    measured = list(race(job, options.seconds))
    ours = measured[-1]
    OUT.print(_table(measured))
    OUT.print(
        "Real tokens per second of the median optimizer step; the ways take their steps in turn. Error: logits of "
        f"{plural(ours.judged, 'row')} of several documents against each document alone in float32, by the largest "
        "logit, in the worst row. Stock packing: rows with restarting position_ids and no mask.",
        style="dim",
    )
    warn_if_busy(max((m.cpu for m in measured if m.cpu is not None), default=None))
    figures([asdict(m) | {"verdict": m.verdict} for m in measured])
    if ours.failure:
        raise PackingError(f"{ours.way}: {ours.failure}")
    if ours.verdict == "contaminated":
        raise ContaminationError(
            f"packed documents see each other: max logit error {ours.difference:.0e}, tolerance {ours.allowed:.0e}"
        )


def _table(measured: list[Measured]) -> Table:
    padded = measured[0].tokens_per_second
    table = Table("", "tokens/s", "to padded", "memory", "verdict", header_style="bold")
    for each in measured:
        ratio = f"{each.tokens_per_second / padded:.2f}x" if padded and not each.failure else "-"
        memory = "-" if each.peak_bytes is None else f"{each.peak_bytes / 2**30:.1f} GiB"
        colour = {"exact": "green", "contaminated": "red"}.get(each.verdict, "yellow")
        error = escape(each.failure) or f"max logit error {each.difference:.0e} (tolerance {each.allowed:.0e})"
        if each.verdict == "not judged":
            error = "no row holds two documents"
        rate = "-" if each.failure else f"{each.tokens_per_second:,.0f}"
        table.add_row(each.way, rate, ratio, memory, f"[{colour}]{each.verdict}[/]: {error}")
    return table
