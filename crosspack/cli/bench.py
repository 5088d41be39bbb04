"""``crosspack bench``: what packing gains for one model, data set and machine, measured in about a minute.

Options become a TrainJob whose steps hold one row; the backend (the entry point group ``crosspack.benches``) measures
each way to train on it; here are the table, the JSON and the exit status.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from crosspack.cli import options
from crosspack.cli.options import OUT, Source
from crosspack.cli.progress import counted
from crosspack.cli.tables import lengths_table
from crosspack.cli.text import Policy
from crosspack.cli.train import SMALL_LLAMA, model_source, special_tokens
from packing_core.errors import ContaminationError, MissingExtraError, PackingError
from packing_core.plan import plan as make_plan
from packing_core.training.job import Measured, Options, TrainJob
from packing_core.training.schedule import Corpus, Schedule

GROUP = "crosspack.benches"


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
    seconds: Annotated[float, typer.Option(min=0.0, help="Of training steps for each way, after one to warm up.")] = 10,
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the forward pass.")] = "float32",
    backend: Annotated[str, typer.Option(help="Which installed backend measures.")] = "torch",
    device: Annotated[str, typer.Option(help="What the backend calls the device; auto takes the fastest.")] = "auto",
    attention: Annotated[str, typer.Option(help="Attention implementation of the packed run.")] = "auto",
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    loss: options.LossOn = "completion",
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure padded, stock packed and crosspack training of your model on your data and your machine."""
    race = _racer(backend)
    built_from, folder = model_source(model)
    source = Source.open(
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
    )
    measured = []
    for figures in race(job, seconds):
        measured.append(figures)
        OUT.print(f"{figures.way}: {_rate(figures)}", highlight=False)
    OUT.print(_table(measured))
    if output is not None:
        output.write_text(json.dumps([{**asdict(m), "verdict": m.verdict} for m in measured], indent=1))
    ours = measured[-1]
    if ours.failure:
        raise PackingError(f"{ours.way}: {ours.failure}")
    if ours.verdict != "exact":
        raise ContaminationError(
            f"packed documents see each other: the logits are off by {ours.difference:.0e} where rounding explains "
            f"{ours.allowed:.0e}"
        )


def _racer(backend: str) -> Callable[[TrainJob, float], Iterator[Measured]]:
    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if backend not in registered:
        raise PackingError(f"--backend {backend}: the installed ones are {', '.join(sorted(registered)) or 'none'}")
    try:
        race: Callable[[TrainJob, float], Iterator[Measured]] = registered[backend].load()
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'crosspack[{backend}]'") from None
    return race


def _rate(measured: Measured) -> str:
    return measured.failure or f"{measured.tokens_per_second:,.0f} real tokens/s"


def _table(measured: list[Measured]) -> Table:
    padded = measured[0].tokens_per_second
    table = Table("", "real tokens/s", "to padded", "memory", "difference from each alone", header_style="bold")
    for each in measured:
        ratio = f"{each.tokens_per_second / padded:.2f}x" if padded and not each.failure else "-"
        memory = "-" if each.peak_bytes is None else f"{each.peak_bytes / 2**30:.1f} GiB"
        colour = {"exact": "green", "contaminated": "red"}.get(each.verdict, "yellow")
        rounding = "" if each.failure else f" ({each.difference:.0e}, rounding {each.allowed:.0e})"
        rate = "-" if each.failure else f"{each.tokens_per_second:,.0f}"
        table.add_row(each.way, rate, ratio, memory, f"[{colour}]{each.verdict}[/]{rounding}")
    return table
