"""``crosspack bench``: what packing gains for one model, data set and machine, measured in about a minute.

Options become a TrainJob whose steps hold one row; the backend (the entry point group ``crosspack.benches``) measures
each way to train on it; here are the table, the JSON and the exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import isfinite
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from crosspack.cli import options
from crosspack.cli.console import OUT, figures
from crosspack.cli.models import SMALL_LLAMA, check_name, model_source, special_tokens
from crosspack.cli.options import EncodedRecords, check_data
from crosspack.cli.progress import counted
from crosspack.cli.tables import lengths_table
from crosspack.cli.trainresult import warn_if_busy
from crosspack.encoding.text import Policy
from packing_core.errors import ContaminationError, PackingError, plural
from packing_core.extras import loaded, registered
from packing_core.planning.plan import plan as make_plan
from packing_core.training.job import Measured, TrainJob
from packing_core.training.options import Options
from packing_core.training.schedule import Corpus, Schedule

GROUP = "crosspack.benches"
Race = Callable[[TrainJob, float], Iterator[Measured]]


def bench(
    model: Annotated[
        str | None,
        typer.Option(help="A folder, a hub name, or a config.json (random weights). Default: a small random Llama."),
    ] = None,
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "truncate",
    padded_batch: Annotated[int, typer.Option(min=1, help="Documents in a padded batch.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.0, help="Of training steps for each of 4 ways.")] = 10,
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the forward pass.")] = "float32",
    backend: Annotated[str, typer.Option(help="Which installed backend measures.")] = "torch",
    device: Annotated[str, typer.Option(help="What the backend calls the device; auto takes the fastest.")] = "auto",
    attention: Annotated[str, typer.Option(help="Attention implementation of the packed run.")] = "auto",
    loss: options.LossOn = "completion",
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure padded, stock packed and crosspack training of your model on your data and your machine."""
    entry = registered(GROUP, backend)
    built_from, folder = model_source(model)
    check_name("--tokenizer", tokenizer)
    check_data(data, split, tokenizer or folder)
    race: Race = loaded(entry, extra=backend)
    source = EncodedRecords.open(
        data, split, tokenizer or folder, Policy(loss, None, None), trust_remote_code=trust_remote_code
    )
    if model is None:
        built_from = SMALL_LLAMA | special_tokens(source.encoder.tokenizer)
    corpus = Corpus.collect(counted(OUT, "documents read", source.documents(capacity, overflow)))
    planned = make_plan(corpus.documents.lengths, capacity, overflow=overflow, seed=seed)
    pad = source.encoder.tokenizer.pad_token_id
    schedule = Schedule(corpus, (planned,), 1, padded_batch, seed=seed, pad_id=0 if pad is None else pad)
    name = model or "a small Llama, random weights"
    OUT.print(f"[bold]{escape(name)}[/] on {source.describe()}", highlight=False)
    OUT.print(lengths_table(corpus.documents.lengths, trained=corpus.n_trained))
    OUT.print(f"rows of {capacity:,}: {planned.n_rows:,}, {planned.efficiency:.1%} real tokens", highlight=False)
    job = TrainJob(
        model=built_from,
        schedule=schedule,
        options=Options(lr=1e-5, precision=precision, seed=seed),
        runs=("padded", "packed"),
        device=device,
        attention=attention,
        trust_remote_code=trust_remote_code,
        on_phase=lambda line: OUT.print(line, style="dim", highlight=False),
    )
    measured = list(race(job, seconds))
    ours = measured[-1]
    OUT.print(_table(measured))
    OUT.print(
        "Real tokens per second of the median optimizer step; the ways take their steps in turn. Error: logits of "
        f"{plural(ours.judged, 'row')} of several documents against each document alone in float32, by the largest "
        "logit, in the worst row. Stock packing: rows with restarting position_ids and no mask.",
        style="dim",
        highlight=False,
    )
    warn_if_busy(max((m.cpu for m in measured if m.cpu is not None), default=None))
    figures([{**_plain(asdict(m)), "verdict": m.verdict} for m in measured])
    if ours.failure:
        raise PackingError(f"{ours.way}: {ours.failure}")
    if ours.verdict == "contaminated":
        raise ContaminationError(
            f"packed documents see each other: max logit error {ours.difference:.0e}, tolerance {ours.allowed:.0e}"
        )


def _plain(measured: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no infinity: what was not measured is null."""
    return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in measured.items()}


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
