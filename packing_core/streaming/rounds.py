"""A round of a stream: the plan of what is pending, which of its rows leave, and the batches that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import pack
from packing_core.errors import LayoutError
from packing_core.planning.assignment import best_fit
from packing_core.planning.mixed import mixed
from packing_core.planning.pieces import Pieces
from packing_core.planning.plan import PackPlan, plan_of
from packing_core.planning.rule import RowRule
from packing_core.storage.arrays import Float64, Int64
from packing_core.streaming.pending import Pending, columns_of, read_now

WASTE = 5e-4  # of the slots of the rows that leave a round; the rest waits for documents that fill it


def plan_round(lengths: Int64, rule: RowRule, seed: list[int] | None, *, once: bool) -> PackPlan:
    """Rows of all that is pending, in the planner's order.

    Args:
        seed: what mixed rows are drawn by; None takes the pieces in their order.
        once: take the first draw of mixed rows: rows that are not full stay, so it will do until the end.
    """
    most = min(rule.max_segments or len(lengths), len(lengths))
    if rule.strategy == "best_fit":
        rows = best_fit(lengths, rule.capacity, most, None)
    else:
        rows = mixed(lengths, rule.capacity, most, None if seed is None else np.random.PCG64(seed), once=once)
    none = np.zeros(0, np.int64)
    return plan_of(rule, Pieces(lengths, dropped=none, truncated=none), rows, len(lengths))


def full_rows(rows: PackPlan) -> tuple[Int64, int]:
    """The rows of a plan by falling number of tokens, and how many of the first ones are full, but for ``WASTE``."""
    tokens = rows.row_tokens
    fullest = np.argsort(-tokens, kind="stable")
    free = np.cumsum((rows.capacity - tokens[fullest]).astype(np.float64))
    within = np.flatnonzero(free <= WASTE * rows.capacity * np.arange(1, rows.n_rows + 1))
    return fullest, int(within[-1]) + 1 if len(within) else 0


def leaving(rows: PackPlan, most_pieces: int, most_tokens: int, old: NDArray[np.bool_]) -> Int64:
    """The rows that leave now: all that are full, enough of them, and all with a piece that is too old.

    Args:
        most_pieces, most_tokens: what may stay pending.
        old: [P] which pieces of the plan must leave.
    """
    tokens, (fullest, full) = rows.row_tokens, full_rows(rows)
    leaves = np.zeros(rows.n_rows, np.bool_)
    leaves[fullest[: max(full, _enough(np.diff(rows.row_offsets), fullest, most_pieces))]] = True
    leaves[fullest[: _enough(tokens, fullest, most_tokens)]] = True
    leaves |= np.logical_or.reduceat(old, rows.row_offsets[:-1])
    return np.flatnonzero(leaves)


def whole_steps(rows: PackPlan, gone: Int64, old: NDArray[np.bool_], share: int, before: int) -> Int64:
    """The rows that leave where each ``share`` rows of the stream are a step: as many as make steps whole.

    The emptiest rows stay, unless nothing would leave then, or a row that is old: the fullest others leave too.

    Args:
        old: [P] which pieces of the plan must leave.
        before: rows that left in earlier rounds.
    """
    must, leaves = np.logical_or.reduceat(old, rows.row_offsets[:-1]), np.zeros(rows.n_rows, np.bool_)
    leaves[gone] = True
    count = (before + len(gone)) // share * share - before
    if count < max(1, int(np.count_nonzero(must))):
        count += share
    return np.lexsort((-rows.row_tokens, ~leaves, ~must))[:count]


def by_step(gone: Int64, costs: Float64, share: int, before: int, seed: list[int] | None) -> Int64:
    """The rows that leave in an order in which each ``share`` rows of the stream cost about the same.

    They are taken by falling cost. ``seed`` shuffles the steps, and the rows of each.

    Args:
        costs: [R] of all rows of the plan.
        before: rows that left in earlier rounds; a step that they began is completed first.
    """
    gone = gone[np.argsort(-costs[gone], kind="stable")]
    begun = -before % share
    first, gone = gone[:begun], gone[begun:]
    whole = len(gone) // share * share
    steps = gone[:whole].reshape(-1, share)
    if seed is not None:
        random = np.random.default_rng(seed)
        steps = random.permuted(random.permutation(steps), axis=1)
    return np.concatenate([first, steps.reshape(-1), gone[whole:]])


def _enough(amount: Int64, order: Int64, most: int) -> int:
    """Returns how many rows leave in this order, at least 1, so that at most ``most`` of the amount stays."""
    gone = np.cumsum(amount[order])
    return int(np.searchsorted(gone, gone[-1] - most)) + 1


def make_rows(pending: Pending, rows: PackPlan, numbers: Int64, rule: RowRule, options: dict[str, Any]) -> PackedBatch:
    """Makes rows ``numbers`` of a plan of the pending pieces, which ``rule`` cut; ``options`` are those of ``pack``.

    Raises:
        LayoutError: a document is not what ``pack`` takes; the error says which one of the stream it is.
    """
    chosen = rows.select(numbers)
    ids, starts = pending.ids[chosen.source], pending.starts[chosen.source]
    contents = read_now([pending.contents[i] for i in chosen.source.tolist()])
    local = PackPlan(
        chosen.row_offsets,
        np.arange(len(contents)),
        np.zeros(len(contents), np.int64),
        chosen.length,
        capacity=rows.capacity,
        n_documents=len(contents),
        context=pending.context[chosen.source] if rule.context_tokens else np.zeros(0, np.int64),
        restarts=rule.overflow == "restart",
        check=False,
    )
    try:
        batch = pack(**columns_of(contents, ids), capacity_or_plan=local, **options)
    except LayoutError:
        for number, content in zip(ids.tolist(), contents, strict=True):
            try:
                pack(**columns_of([content], ids[:1]), capacity_or_plan=rows.capacity, **options)
            except LayoutError as error:
                raise LayoutError(f"document {number} of the stream: {error}") from None
        raise
    return replace(batch, sources=ids, starts=starts)
