"""The tables of the console commands: plans, lengths and records in, rich tables and sentences out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import numpy as np
from rich.table import Table

from crosspack.cli.console import warn
from crosspack.cli.progress import LABELS
from packing_core.errors import plural
from packing_core.planning.composition import Composition
from packing_core.planning.plan import PackPlan
from packing_core.storage.arrays import Int64
from packing_core.training.job import TrainResult
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Run, Schedule

BUSY = 0.7  # of the processor time that an idle machine gives
ENOUGH = 50  # optimizer steps below which a run is warned of
SLOWER = "packing takes longer, because its rows are not full: lower --capacity"


def lengths_table(lengths: Int64, *, trained: int | None = None) -> Table:
    """Tabulates the number of documents and their lengths; ``trained`` counts the tokens that carry loss."""
    table = _table("documents", "tokens", "trained", "mean", "median", "p99", "longest")
    middle, p99 = np.percentile(lengths, [50, 99])
    table.add_row(
        f"{len(lengths):,}",
        f"{lengths.sum():,}",
        "-" if trained is None else f"{trained:,}",
        *(f"{number:,.0f}" for number in (lengths.mean(), middle, p99, lengths.max())),
    )
    return table


def memory_table(longest: Mapping[str, int], gib: float, *, adapters: int | None) -> Table:
    """Tabulates the longest row, or single document, that trains at each level of memory."""
    what = "all weights" if adapters is None else f"adapters of rank {adapters}"
    table = _table(f"level of memory, {what} in bfloat16, AdamW", f"longest row or document in {gib:g} GiB")
    for level, tokens in longest.items():
        table.add_row(level, f"{tokens:,}" if tokens else "none fits")
    return table


def steps_table(schedule: Schedule) -> Table:
    """Compares an optimizer step on packed rows with one that takes as many documents as a step has rows."""
    rows, steps, plan = schedule.rows_per_step, len(schedule), schedule.plans[0]
    documents = schedule.corpus.documents
    packed_documents = np.mean([len(step.source) for step in schedule.steps])
    packed_trained = np.mean(schedule.trained_tokens)
    table = _table("", "unpacked", "packed")
    table.add_row(
        "sequences per optimizer step", plural(rows, "document"), f"{plural(rows, 'row')} of {plan.capacity:,}"
    )
    table.add_row("sequences per epoch", f"{len(documents):,}", f"{plan.n_rows:,} (efficiency {plan.efficiency:.1%})")
    table.add_row("optimizer steps per epoch", f"{-(-len(documents) // rows):,}", f"{-(-plan.n_rows // rows):,}")
    table.add_row("documents per step", f"{rows}", f"{packed_documents:,.1f}")
    table.add_row(
        "trained tokens per step", f"{rows * packed_trained / packed_documents:,.0f}", f"{packed_trained:,.0f}"
    )
    table.add_row("optimizer steps of this run", "-", f"{steps:,}")
    return table


def few_steps_line(schedule: Schedule) -> str | None:
    """Says how to get :data:`ENOUGH` optimizer steps where a run has fewer; None where --steps names their number."""
    rows = min(plan.n_rows for plan in schedule.plans)
    if len(schedule) >= ENOUGH or schedule.limit is not None:
        return None
    every = -(-rows // schedule.rows_per_step)
    ways = [f"--epochs {-(-ENOUGH // every)}"]
    if schedule.rows_per_step > 1:
        ways.append(f"--rows-per-step 1, which makes {plural(rows * len(schedule.plans), 'step')}")
    return (
        f"{plural(len(schedule), 'optimizer step')} of {plural(schedule.rows_per_step, 'row')} may be too few to learn "
        f"from: for {ENOUGH}, pass {' or '.join(ways)}, or a smaller --capacity"
    )


def epoch_tokens(schedule: Schedule) -> tuple[int, int]:
    """Tokens that a model computes in an epoch: of packed rows, and of padded batches of the same documents."""
    size, plan = schedule.padded_batch, schedule.plans[0]
    computed = computed_tokens(plan, batches=(size,), seed=schedule.seed)
    return computed[packed_name(plan)], computed[f"batches of {size}, random"]


def saving_line(schedule: Schedule) -> str:
    """Compares the tokens computed in an epoch of packed rows with padded batches of the same documents."""
    packed, padded = epoch_tokens(schedule)
    return (
        f"an epoch computes {packed:,} tokens; padded batches of {schedule.padded_batch} would compute {padded:,}: "
        + (SLOWER if packed > padded else f"packing saves about {1 - packed / padded:.0%} of the time")
    )


def cap_line(capped: PackPlan, free: PackPlan, cap: int) -> str:
    """Compares rows of at most ``cap`` documents with rows of any number of them."""
    return (
        f"with at most {plural(cap, 'document')} a row: {plural(capped.n_rows, 'row')}, {capped.efficiency:.1%} full; "
        f"without --max-segments {free.n_rows:,}, {free.efficiency:.1%} full"
    )


def saved_line(schedule: Schedule, records: Sequence[StepRecord]) -> str:
    """Says what an epoch takes at the speed of a run that has ended; each computed token is taken to cost the same."""
    a_second = median(record.slots / record.seconds for record in records[1:] or records)
    packed, padded = (tokens / a_second for tokens in epoch_tokens(schedule))
    return epoch_line(packed, padded, schedule.padded_batch, "at this speed")


def outcome_line(records: list[StepRecord]) -> str:
    """Summarises a run without ``--compare`` in a line."""
    eval_loss = records[-1].eval_loss
    evaluated = "" if eval_loss is None else f", evaluation loss {eval_loss:.4f}"
    return (
        f"{plural(len(records), 'step')}, {rate(records):,.0f} real tokens/s (median step), "
        f"{padding(records):.1%} padding, loss {records[0].loss:.4f} to {records[-1].loss:.4f}{evaluated}"
    )


def epoch_line(packed: float, padded: float, size: int, speed: str) -> str:
    """Compares the seconds of an epoch of packed rows with padded batches of ``size``, at the speed that is named."""
    saving = SLOWER if packed > padded else f"packing saves {duration(padded - packed)} ({1 - packed / padded:.0%})"
    return (
        f"an epoch takes about {duration(packed)} ({speed}); in padded batches of {size} it would take about "
        f"{duration(padded)}: {saving}"
    )


def duration(seconds: float) -> str:
    """Writes a time for people, in the largest unit that there is one of.

    >>> duration(0.00421), duration(4.21), duration(75), duration(5400), duration(200_000)
    ('4.2 ms', '4.2 s', '1.2 min', '1.5 h', '2.3 days')
    """
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min"), (0.1, "s")):
        if seconds >= size:
            return f"{seconds / max(size, 1):,.1f} {unit}"
    return f"{seconds * 1000:,.2g} ms"


def computed_tokens(plan: PackPlan, *, batches: Sequence[int], seed: int) -> dict[str, int]:
    """Tokens that a model computes for one epoch: padded in random and in sorted batches, and packed.

    Args:
        plan: the packed rows; their pieces are what would be padded.
    """
    padded = {name: int((counts * longest).sum()) for name, counts, longest in padded_batches(plan, batches, seed)}
    return {**padded, packed_name(plan): plan.n_rows * plan.capacity}


def packed_name(plan: PackPlan) -> str:
    """Names packed rows among the arrangements of documents."""
    return f"rows of {plan.capacity:,}, packed"


def padded_batches(plan: PackPlan, batches: Sequence[int], seed: int) -> Iterator[tuple[str, Int64, Int64]]:
    """Yields the padded batches of the documents of a plan, in random and in sorted order.

    Returns:
        The name of the arrangement, and of each of its batches the documents and the tokens of the longest.
    """
    orders = {"random": np.random.default_rng(seed).permutation(plan.length), "sorted": -np.sort(-plan.length)}
    for size in batches:
        starts = np.arange(0, len(plan.length), size)
        counts = np.diff(np.append(starts, len(plan.length)))
        for name, lengths in orders.items():
            yield f"batches of {size}, {name}", counts, np.maximum.reduceat(lengths, starts)


def savings_table(plan: PackPlan, *, batches: Sequence[int], seed: int) -> Table:
    """Tabulates the counts of :func:`computed_tokens`, and the share of padding in them."""
    table = _table("", "sequences", "computed tokens", "padding", "packed / this")
    computed = computed_tokens(plan, batches=batches, seed=seed)
    packed, real = plan.n_rows * plan.capacity, plan.n_tokens
    for name, slots in computed.items():
        sequences = plan.n_rows if name.endswith("packed") else len(plan.length)
        table.add_row(name, f"{sequences:,}", f"{slots:,}", f"{1 - real / slots:.1%}", f"{packed / slots:.1%}")
    return table


def composition_table(rows: Composition, random: Composition) -> Table:
    """Compares rows and steps with rows of documents in random order; deviations are over the mean."""
    table = _table("", "these rows", "random rows")

    def add(name: str, cell: Callable[[Composition], str]) -> None:
        table.add_row(name, cell(rows), cell(random))

    add("documents per row, mean", lambda made: f"{made.documents_per_row:,.1f}")
    add("documents per row, deviation", lambda made: f"{made.documents_per_row_deviation:.2f}")
    step = f"documents per step of {rows.rows_per_step} rows, deviation"
    add(step, lambda made: f"{made.documents_per_step_deviation:.2f}")
    spread = f"spread of log length in a row (all: {rows.data_length_spread:.2f})"
    add(spread, lambda made: f"{made.length_spread:.2f}")
    add("Kolmogorov-Smirnov distance to all lengths, row", lambda made: f"{made.row_distance:.2f}")
    add("Kolmogorov-Smirnov distance to all lengths, step", lambda made: f"{made.step_distance:.2f}")
    add("attention cost per row (squared tokens), mean", lambda made: f"{made.attention_per_row:,.0f}")
    add("attention cost per row, deviation", lambda made: f"{made.attention_per_row_deviation:.2f}")
    return table


def comparison_table(result: TrainResult) -> Table:
    """The runs of ``--compare`` side by side."""
    runs = list(result.records)
    table = _table("", *(LABELS[run] for run in runs))
    packed = result.records["packed"]
    first = rate(result.records[runs[0]])

    def add(name: str, cells: dict[Run, str]) -> None:
        table.add_row(name, *(cells[run] for run in runs))

    add("real tokens/s, median step", {run: f"{rate(result.records[run]):,.0f}" for run in runs})
    add("speed", {run: f"{rate(result.records[run]) / first:.2f}x" for run in runs})
    add("padding", {run: f"{padding(result.records[run]):.1%}" for run in runs})
    add("seconds", {run: f"{sum(record.seconds for record in result.records[run]):.1f}" for run in runs})
    add("last loss", {run: f"{result.records[run][-1].loss:.4f}" for run in runs})
    add(
        "max loss difference from packed",
        {run: "" if run == "packed" else f"{loss_difference(result.records[run], packed):.1e}" for run in runs},
    )
    if result.peak_bytes:
        add("peak memory", {run: f"{result.peak_bytes[run] / 2**30:.1f} GiB" for run in runs})
    return table


def rate(records: Sequence[StepRecord]) -> float:
    """Real tokens per second of the median step; the first step warms up and is left out where there are others."""
    return median(record.tokens / record.seconds for record in records[1:] or records)


def padding(records: Sequence[StepRecord]) -> float:
    """The share of the computed tokens that is padding."""
    return 1 - sum(record.tokens for record in records) / sum(record.slots for record in records)


def loss_difference(records: Sequence[StepRecord], others: Sequence[StepRecord]) -> float:
    """Returns the largest difference between the losses of two runs over the same steps; NaN where one is."""
    return float(np.max([abs(a.loss - b.loss) for a, b in zip(records, others, strict=True)]))


def warn_if_busy(cpu: float | None) -> None:
    """Warn that speeds are unreliable if the steps got much less processor time than their threads could use."""
    if cpu is not None and cpu < BUSY:
        warn(
            f"the steps got {cpu:.0%} of the processor time that their threads could use, so the machine is busy and "
            "speeds are unreliable (losses are not): run it again when nothing else runs"
        )


def _table(*columns: str) -> Table:
    table = Table(header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number or column else "left")
    return table
