"""``crosspack report``: what packing would save on this data, as tables and on request a page.

The lengths of the documents are kept, and of the first ones what carries loss.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from crosspack.cli.charts import Segment
from crosspack.cli.concerns import KEPT, DocumentFigures, concerns, read_figures
from crosspack.cli.console import OUT, figures, warn
from crosspack.cli.documents import in_pieces
from crosspack.cli.findings import (
    by_cap,
    by_policy,
    by_rank,
    by_strategy,
    gpu_of,
    histogram,
    hours,
    longest_rows,
)
from crosspack.cli.models import model_config, tokenizer_source
from crosspack.cli.options import (
    DataOptions,
    EncodedRecords,
    OverflowPolicy,
    PlanOptions,
    TokenOptions,
    check_data,
)
from crosspack.cli.page import page
from crosspack.cli.speed import GPUS, Speed, said_of
from crosspack.cli.tables import (
    cap_line,
    composition_table,
    computed_tokens,
    epoch_line,
    lengths_table,
    memory_table,
    savings_table,
)
from crosspack.encoding.kinds import kind_of_row
from crosspack.encoding.text import Encoder
from crosspack.packing.unit import Key
from crosspack.reading import Records
from packing_core.errors import PackingError, UnsupportedModelError, plural
from packing_core.planning.cost import Cost
from packing_core.planning.packplan import PackPlan
from packing_core.planning.plan import plan as make_plan
from packing_core.storage.arrays import Int64
from packing_core.training.files import written_beside

BATCHES = (8, 16)  # sizes of the padded batches that packing is compared with
SHOWN = 16  # rows that the page shows
Shape = Literal["llama-1b", "llama-8b", "llama-70b"]


@dataclass(frozen=True)
class ReportOptions(TokenOptions, PlanOptions, DataOptions):
    """The options of ``crosspack report``."""

    overflow: OverflowPolicy = "truncate"
    output: Annotated[
        Path | None, typer.Option(help="Write a page there: lengths, padding, rows, costs and times as charts.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that --output names.")] = False
    shape: Annotated[
        Shape | None, typer.Option(help="The model whose time is estimated. Default: --model, or else llama-8b.")
    ] = None
    gpu: Annotated[
        str,
        typer.Option(help=f"The GPU whose time and memory are estimated: {', '.join(GPUS)}, or GiB."),
    ] = "h100"
    measured: Annotated[
        Path | None,
        typer.Option("--run", help="The --output of a run of crosspack train: its model and speed are taken instead."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Whose tokens and time count, and whose longest rows that fit are shown: folder, file, hub name."
        ),
    ] = None
    adapters: Annotated[
        int | None, typer.Option(min=1, help="With --model: only low-rank adapters of this rank are trained.")
    ] = None
    ranks: Annotated[int, typer.Option(min=2, max=1 << 16, help="Ranks that rows are balanced over.")] = 8
    compare_rows: Annotated[
        bool, typer.Option("--composition", help="Also show what rows are made of, beside rows in random order.")
    ] = False


def report(options: ReportOptions) -> None:
    """Show what packing would save on your data.

    All documents are read, by a process for each core; 24 bytes of each are kept, beside about 0.3 GB for the libraries
    and 0.1 GB for each process.
    """
    if options.output is not None:
        _check_output(options.output, overwrite=options.overwrite)
    capacity, seed, model, gpu = options.capacity, options.seed, options.model, options.gpu
    options = replace(options, tokenizer=tokenizer_source(model, options.tokenizer))
    if options.adapters is not None and model is None:
        raise PackingError(
            f"--adapters {options.adapters} has an effect with --model alone: name the model, or leave it out"
        )
    card, gib = gpu_of(gpu)
    config = None if model is None else model_config(model)
    about_model: dict[str, Any] = {}
    if config is not None:
        about_model = {"model": model, "gpu_gib": gib}
        try:
            memory = longest_rows(config, gib, options.adapters)
        except UnsupportedModelError as error:  # the data are reported in any case
            if options.data is None:
                raise
            warn(f"--model {model}: {error}")
        else:
            about_model["longest_rows"] = memory
            OUT.print(memory_table(memory, gib, adapters=options.adapters))
        if options.data is None:
            figures(about_model)
            return
    records = check_data(options.data, options.split, options.tokenizer)
    source: EncodedRecords | None = None
    if options.tokenizer is not None or kind_of_row(next(iter(records))) != "input_ids":
        source = EncodedRecords.of(
            records, options.tokenizer, options.policy, trust_remote_code=options.trust_remote_code
        )
    seen = _read(records, None if source is None else source.encoder, capacity, options.overflow)
    if not len(seen):
        raise PackingError("no document has a token to train on: check --data, its columns and --loss")
    documents, trained, rule = seen.lengths, int(seen.trained.sum()), options.row_rule()
    packed = make_plan(documents, rule, seed=seed)
    shuffled = np.random.default_rng(seed).permutation(packed.length)
    random = make_plan(shuffled, capacity, strategy="sequential", seed=None)
    OUT.print(f"{records.name}, which holds token ids" if source is None else source.describe())
    if options.tokenizer is None and source is not None:
        OUT.print("tokens of that tokenizer: pass the --model or --tokenizer to be trained, whose count differs")
    OUT.print(lengths_table(documents, trained=trained))
    cut = _cut(documents, packed)
    _print_cut(cut, documents, packed, options.overflow)
    composition = packed.composition()
    name = options.shape or model or "llama-8b"
    if options.measured is None:
        speed = Speed.stated(name, card, config if options.shape is None else None)
    else:
        speed = Speed.measured(options.measured, packed)
    OUT.print(savings_table(packed, batches=BATCHES, seed=seed))
    if rule.max_segments is not None:
        free = make_plan(documents, replace(rule, max_segments=None), seed=seed)
        OUT.print(cap_line(packed, free, rule.max_segments))
    if options.compare_rows:
        OUT.print(composition_table(composition, random.composition()))
    taken = hours(packed, speed, BATCHES, seed)
    place = f"on one {card}" if gpu == card else f"at the speed of one {card}, as {gpu} GiB name no card"
    of = f"estimated for {name} {place}"
    if options.measured is not None:
        of = f"at the speed of {options.measured} on {speed.about['device']}"
    padded_time, packed_time = (3600 * way["hours"] for way in (taken[0], taken[-1]))
    OUT.print(epoch_line(packed_time, padded_time, BATCHES[0], of))
    timing: dict[str, Any] = {**speed.about, "hours": taken, "row_seconds": speed.of_row(packed)}
    if step_seconds := speed.of_step(packed):
        timing["step_seconds"] = step_seconds
    if options.measured is not None:
        OUT.print(said_of(timing))
    warnings = concerns(seen, packed)
    for concern in warnings:
        warn(concern.text)
    findings: dict[str, Any] = {
        "data": records.name,
        "tokenizer": "none, the data holds token ids" if source is None else source.tokenizer,
        "documents": len(documents),
        "tokens": int(documents.sum()),
        "trained_tokens": trained,
        "longest": int(documents.max()),
        "capacity": capacity,
        "overflow": options.overflow,
        "packing": options.packing,
        **cut,
        "max_segments": rule.max_segments,
        "caps": by_cap(documents, rule, seed),
        "warnings": [asdict(concern) for concern in warnings],
        "computed_tokens": computed_tokens(packed, batches=BATCHES, seed=seed),
        "composition": asdict(composition),
        "length_histogram": histogram(documents),
        "row_cost_histogram": histogram(Cost(tokens=0, squares=1).of_rows(packed)),
        "strategies": by_strategy(documents, capacity, options.overflow, seed, speed),
        "policies": by_policy(documents, capacity, context=options.context, min_piece=options.min_piece),
        "ranks": by_rank(packed, options.ranks, speed.cost, seed),
        "time": timing,
    }
    figures(findings | about_model)
    if options.output is None:
        return
    pictured_rows, pictured_of = packed, ""
    if len(documents) > KEPT:
        pictured_rows = make_plan(documents[:KEPT], rule, seed=seed)
        pictured_of = f"They are made of the first {KEPT:,} documents."
    with written_beside(options.output) as partial:
        text = page({**findings, "pictured": pictured_of}, pictured(pictured_rows, seen.masks))
        partial.write_text(text, encoding="utf-8")
    OUT.print(f"page: {options.output}")


def _cut(documents: Int64, packed: PackPlan) -> dict[str, int]:
    """Counts documents that are longer than a row, and the tokens that this leaves out or repeats as context."""
    context = int(packed.context.sum())
    return {
        "longer_than_capacity": int(np.count_nonzero(documents > packed.capacity)),
        "tokens_left_out": int(documents.sum()) - packed.n_tokens + context,
        "context_tokens": context,
    }


def _print_cut(cut: dict[str, int], documents: Int64, packed: PackPlan, overflow: str) -> None:
    long, lost, context = cut.values()
    if long:
        OUT.print(
            f"{plural(long, 'document')} longer than {packed.capacity:,} tokens, under --overflow {overflow}: "
            f"{lost:,} tokens ({lost / documents.sum():.1%}) are left out of the table below"
        )
    if context:
        OUT.print(
            f"{context:,} tokens ({context / packed.n_tokens:.1%} of those in the rows) are context, "
            "trained in an earlier piece"
        )


def pictured(rows: PackPlan, masks: list[NDArray[np.uint8]]) -> list[list[Segment]]:
    """The segments of the first rows, with the runs of their tokens that carry loss.

    Args:
        masks: of each document, which tokens are trained, as bits. The first token of a segment and its context never
            carry loss.
    """
    shown = []
    for row in range(min(rows.n_rows, SHOWN)):
        pieces = range(int(rows.row_offsets[row]), int(rows.row_offsets[row + 1]))
        segments = []
        for piece in pieces:
            document, start, length = (int(x[piece]) for x in (rows.source, rows.start, rows.length))
            trained = np.unpackbits(masks[document])[start : start + length].astype(np.int8)
            trained[: max(1, int(rows.untrained[piece]))] = 0
            turns = np.flatnonzero(np.diff(trained, prepend=0, append=0)).reshape(-1, 2).tolist()
            segments.append(Segment(document, int(rows.offset[piece]), length, [(a, b) for a, b in turns]))
        shown.append(segments)
    return shown


def _read(records: Records, encoder: Encoder | None, capacity: int, overflow: str) -> DocumentFigures:
    """Reads the documents, of token ids if there is no encoder; in their order, however many processes read."""
    read = partial(read_figures, encoder, capacity if overflow == "error" else None)
    parts: dict[Key, DocumentFigures] = {}
    for key, seen in in_pieces(records, capacity, read):
        if sum(len(part.masks) for before, part in parts.items() if before < key) >= KEPT:
            seen.masks.clear()
        parts[key] = seen
    whole = DocumentFigures()
    for key in sorted(parts):
        whole.extend(parts.pop(key))
    if encoder is not None:
        encoder.left_out = whole.left_out
    return whole


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse what cannot be written or would replace a file, before anything is read."""
    if path.suffix.lower() != ".html":
        raise PackingError(f"--output {path}: name a page that ends in .html")
    if path.is_dir():
        raise PackingError(f"--output {path} is a folder: name a file inside it")
    if path.exists() and not overwrite:
        raise PackingError(f"--output {path} exists: pass --overwrite or another name")
