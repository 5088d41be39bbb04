"""``crosspack report``: what packing would save on this data, as tables and on request a page or a picture.

The lengths of the documents are kept, and of the first ones what carries loss; only the picture needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from crosspack.cli import options
from crosspack.cli.charts import Segment
from crosspack.cli.concerns import DocumentFigures, Int64, concerns
from crosspack.cli.console import OUT, figures, warn
from crosspack.cli.figures import report_figure
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
from crosspack.cli.models import check_name, model_config
from crosspack.cli.options import EncodedRecords, check_data
from crosspack.cli.page import page
from crosspack.cli.progress import counted
from crosspack.cli.speed import Speed, said_of
from crosspack.cli.tables import (
    cap_line,
    composition_table,
    computed_tokens,
    epoch_line,
    lengths_table,
    memory_table,
    savings_table,
)
from crosspack.encoding.kinds import Where, kind_of
from crosspack.encoding.layouts import canonical
from crosspack.encoding.text import Policy
from crosspack.encoding.tokens import check_length, token_documents
from packing_core.errors import PackingError, plural
from packing_core.extras import require
from packing_core.planning.cost import Cost
from packing_core.planning.packplan import PackPlan
from packing_core.planning.plan import plan as make_plan
from packing_core.training.schedule import Document

BATCHES = (8, 16)  # sizes of the padded batches that packing is compared with
PAGES, PICTURES = (".html",), (".png", ".pdf", ".svg")
KEPT = 20_000  # documents of which it is remembered which tokens carry loss, for the rows that the page shows
SHOWN = 16  # rows that the page shows
Shape = Literal["llama-1b", "llama-8b", "llama-70b"]


def report(
    data: options.Data = None,
    split: options.Split = "train",
    tokenizer: options.TokenizerName = None,
    capacity: options.Capacity = 2048,
    overflow: options.OverflowPolicy = "truncate",
    context: options.Context = None,
    min_piece: options.MinPiece = 1,
    max_segments: options.MaxSegments = None,
    packing: options.Packing = "mixed",
    loss: options.LossOn = "completion",
    bos: options.Bos = None,
    eos: options.Eos = None,
    seed: options.Seed = 0,
    output: Annotated[
        Path | None, typer.Option(help="Write a page (.html) or draw a picture (.png, .pdf or .svg) there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that --output names.")] = False,
    shape: Annotated[Shape, typer.Option(help="The model whose time is estimated.")] = "llama-8b",
    gpu: Annotated[
        str,
        typer.Option(help="The GPU whose time and memory are estimated: a100, h100, h200, b200, l4, rtx4090, or GiB."),
    ] = "h100",
    measured: Annotated[
        Path | None,
        typer.Option("--run", help="The --output of a run of crosspack train: its model and speed are taken instead."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also show the longest rows of this model that fit: a folder, file or hub name.")
    ] = None,
    adapters: Annotated[
        int | None, typer.Option(min=1, help="With --model: only low-rank adapters of this rank are trained.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, max=1 << 16, help="Ranks that rows are balanced over.")] = 8,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show what packing would save on your data."""
    if output is not None:
        _check_output(output, overwrite=overwrite)
    check_name("--tokenizer", tokenizer)
    if adapters is not None and model is None:
        raise PackingError(f"--adapters {adapters} has an effect with --model alone: name the model, or leave it out")
    card, gib = gpu_of(gpu)
    memory = None if model is None else longest_rows(model_config(model), gib, adapters)
    if memory is not None:
        OUT.print(memory_table(memory, gib, adapters=adapters))
        if data is None:
            figures({"model": model, "gpu_gib": gib, "longest_rows": memory})
            return
    opened = _open(data, split, tokenizer, Policy(loss, bos, eos), trust_remote_code=trust_remote_code)
    seen, masks = _read(opened, capacity, overflow)
    documents, trained = seen.lengths, int(seen.trained.sum())
    limits: dict[str, Any] = {
        "overflow": overflow,
        "context": context,
        "min_piece": min_piece,
        "max_segments": max_segments,
    }
    packed = make_plan(documents, capacity, strategy=packing, seed=seed, **limits)
    shuffled = np.random.default_rng(seed).permutation(packed.length)
    random = make_plan(shuffled, capacity, strategy="sequential", seed=None)
    OUT.print(opened.describe(), highlight=False)
    OUT.print(lengths_table(documents, trained=trained))
    cut = _cut(documents, packed)
    _print_cut(cut, documents, packed, overflow)
    composition = packed.composition()
    speed = Speed.stated(shape, card) if measured is None else Speed.measured(measured, packed)
    OUT.print(savings_table(packed, batches=BATCHES, seed=seed))
    if max_segments is not None:
        free = make_plan(documents, capacity, strategy=packing, seed=seed, **limits | {"max_segments": None})
        OUT.print(cap_line(packed, free, max_segments), highlight=False)
    OUT.print(composition_table(composition, random.composition()))
    taken = hours(packed, speed, BATCHES, seed)
    if measured is None:
        ways = {way["arrangement"]: way["hours"] for way in taken}
        OUT.print(epoch_line(ways, f"estimated for {shape} on one {card}"), highlight=False)
    warnings = concerns(seen, packed)
    for concern in warnings:
        warn(concern.text)
    timing: dict[str, Any] = {**speed.about, "hours": taken, "row_seconds": speed.of_row(packed)}
    if step_seconds := speed.of_step(packed):
        timing["step_seconds"] = step_seconds
    found: dict[str, Any] = {
        "data": opened.name,
        "tokenizer": opened.tokenizer,
        "documents": len(documents),
        "tokens": int(documents.sum()),
        "trained_tokens": trained,
        "longest": int(documents.max()),
        "capacity": capacity,
        "overflow": overflow,
        "packing": packing,
        **cut,
        "max_segments": max_segments,
        "caps": by_cap(documents, capacity, {**limits, "strategy": packing, "seed": seed}),
        "warnings": [asdict(concern) for concern in warnings],
        "computed_tokens": computed_tokens(packed, batches=BATCHES, seed=seed),
        "composition": asdict(composition),
        "length_histogram": _histogram(documents),
        "row_cost_histogram": _histogram(Cost(tokens=0, squares=1).of_rows(packed)),
        "strategies": by_strategy(documents, capacity, overflow, seed, speed),
        "policies": by_policy(documents, capacity, context=context, min_piece=min_piece),
        "ranks": by_rank(packed, ranks, speed.cost, seed),
        "time": timing,
    }
    if measured is not None:
        OUT.print(said_of(timing), highlight=False)
    figures(found if memory is None else found | {"model": model, "gpu_gib": gib, "longest_rows": memory})
    if output is None:
        return
    if output.suffix.lower() in PAGES:
        some, said = packed, ""
        if len(documents) > KEPT:
            some = make_plan(documents[:KEPT], capacity, strategy=packing, seed=seed, **limits)
            said = f"They are made of the first {KEPT:,} documents."
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page({**found, "pictured": said}, pictured(some, masks)), encoding="utf-8")
        OUT.print(f"page: {output}", highlight=False)
    else:
        title = f"Packing {opened.name}"
        report_figure(documents, packed, random, output, batches=BATCHES, seed=seed, title=title)
        OUT.print(f"picture: {output}", highlight=False)


def _read(
    opened: _Tokenised | _Encoded, capacity: int, overflow: str
) -> tuple[DocumentFigures, list[NDArray[np.uint8]]]:
    """Reads the documents; the second result has the trained tokens of the first ``KEPT`` of them, as bits."""
    masks: list[NDArray[np.uint8]] = []
    seen = DocumentFigures()
    for document in counted(OUT, "documents read", opened.documents(capacity, overflow, seen.leave_out)):
        seen.add(document)
        if len(masks) < KEPT:
            masks.append(np.packbits(document.trained))
    if not len(seen.lengths):
        raise PackingError("no document has a token to train on: check --data, its columns and --loss")
    return seen, masks


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
            f"{lost:,} tokens ({lost / documents.sum():.1%}) are left out of the table below",
            highlight=False,
        )
    if context:
        OUT.print(
            f"{context:,} tokens ({context / packed.n_tokens:.1%} of those in the rows) are context, "
            "trained in an earlier piece",
            highlight=False,
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


class _Tokenised:
    """Data that holds token ids, packed or not, for which no tokenizer is needed."""

    tokenizer = "none, the data holds token ids"

    def __init__(self, records: Any) -> None:
        self.records, self.name = records, records.name
        self.left_out = 0

    def describe(self) -> str:
        """Describes the data that are read."""
        left = f"\n{plural(self.left_out, 'document')} with nothing to train on, left out" if self.left_out else ""
        return f"{self.name}, which holds token ids{left}"

    def documents(self, capacity: int, overflow: str, left_out: Callable[[Where, int], None]) -> Iterator[Document]:
        """The documents; packed rows are cut into theirs. See :meth:`.EncodedRecords.documents`."""
        for record in self.records:
            if record.get("input_ids") is None:
                raise PackingError(f"{record.where} holds no token ids, as the records before it do: pass --tokenizer")
            for document, _ in token_documents(record, record.where):
                if not document.has_target:
                    self.left_out += 1
                    left_out(record.where, len(document.ids))
                    continue
                if overflow == "error":
                    check_length(record.where, document, capacity)
                yield document


class _Encoded:
    """Data that is tokenised."""

    def __init__(self, source: EncodedRecords) -> None:
        self.name, self.tokenizer = source.records.name, source.tokenizer
        self.describe, self.documents = source.describe, source.documents


def _open(
    data: Sequence[str] | None, split: str, tokenizer: str | None, policy: Policy, **options: Any
) -> _Tokenised | _Encoded:
    records = check_data(data, split, tokenizer)
    first = next(iter(records))
    if tokenizer is None and kind_of(canonical(first, first.where, ()), first.where) == "input_ids":
        return _Tokenised(records)
    return _Encoded(EncodedRecords.open(data, split, tokenizer, policy, **options))


def _histogram(values: NDArray[Any]) -> dict[str, Any]:
    counts, edges = histogram(values)
    return {"counts": counts, "edges": edges}


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse what cannot be written or would replace a file, before anything is read."""
    if path.suffix.lower() not in PAGES:
        require("matplotlib.figure", extra="plot")
    if path.suffix.lower() not in PAGES + PICTURES:
        raise PackingError(f"--output {path}: name a page that ends in .html or a picture in {', '.join(PICTURES)}")
    if path.is_dir():
        raise PackingError(f"--output {path} is a folder: name a file inside it")
    if path.exists() and not overwrite:
        raise PackingError(f"--output {path} exists: pass --overwrite or another name")
