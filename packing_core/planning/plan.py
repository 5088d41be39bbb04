"""Lengths in, PackPlan out: which document goes into which row. No tokens pass through here.

``plan`` checks and cuts the lengths (``pieces``), packs them into rows (``assignment``, ``bins``) and writes those down
as a ``PackPlan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from packing_core.errors import PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning import assignment
from packing_core.planning.assignment import RowAssignment, Shuffle
from packing_core.planning.mixed import mixed
from packing_core.planning.order import Order, OrderRule, ordered_rows
from packing_core.planning.packplan import PackPlan
from packing_core.planning.pieces import Overflow, Pieces, check_lengths, check_seed
from packing_core.planning.rule import RowRule, Strategy
from packing_core.storage.arrays import Int64

__all__ = ["Order", "Overflow", "PackPlan", "Strategy", "plan"]


@hinted()
def plan(
    lengths: ArrayLike,
    capacity: int | RowRule,
    *,
    strategy: Strategy = "mixed",
    overflow: Overflow = "error",
    context: int | None = None,
    min_piece: int = 1,
    max_segments: int | None = None,
    seed: int | None = 0,
    order: Order = "random",
    keys: Any = None,
    weights: Mapping[Any, float] | None = None,
) -> PackPlan:
    """Decide which document goes into which row.

    The same arguments give the same plan on every machine.

    >>> plan([5, 3, 4, 4], capacity=8, seed=None).to_lists()
    [[0, 1], [2, 3]]

    Args:
        lengths: [N] tokens of each document, integers of at least 1.
        capacity: tokens a row can hold, or a :class:`.rule.RowRule`, which replaces every other option but ``seed``.
        strategy: ``mixed`` makes rows whose lengths look like a random draw: it fills rows with documents in random
            order and their ends with the longest documents that still fit; rows are at least 99.9% full or, where those
            of ``best_fit`` are not, at most 0.5% more of them (exact definition: :func:`.mixed.mixed`). ``best_fit``
            takes documents by decreasing length and puts each into the fullest row that takes it (best-fit-decreasing):
            rows of one length class. ``first_fit`` puts documents by decreasing length into the earliest opened row
            that takes them (first-fit-decreasing); ``sequential`` keeps the order of the documents and closes a row
            when the next one does not fit (next fit).
        overflow: what to do with a document longer than ``capacity``. ``error`` raises, ``truncate`` keeps its first
            ``capacity`` tokens, ``split`` cuts it into pieces that become segments of their own, ``drop`` omits it.
            ``overlap`` splits it too, and each later piece begins with the ``context`` tokens before it; ``restart``
            splits it, and each later piece begins with the first ``context`` tokens of the document. Tokens of context
            are seen and not trained, so every token is trained at most once. Two pieces of one document never share a
            row.
        context: tokens of context under ``overlap`` and ``restart``; None is an eighth of the capacity. Rows hold them
            beside the tokens that they train.
        min_piece: the least tokens, without context, of each piece of a document that is cut. A last piece that would
            be shorter takes the missing ones from the piece before it. At most half of ``capacity - context``.
        max_segments: most pieces in a row; None for no limit. Short documents then leave rows partly empty: compare
            ``PackPlan.efficiency``.
        seed: shuffles the finished rows, so that planning order is not training order; None keeps the planner's.
            Under ``mixed`` it also draws the documents; None takes them in their own order.
        order: the order of the rows. ``random`` shuffles them by ``seed``. The others follow an order of the documents:
            ``curriculum`` trains short pieces first, in stages of one octave of length (65 to 128 tokens, 129 to 256),
            whose rows have the same tokens and ever fewer documents; ``sorted`` follows the ``keys``, smallest first;
            ``grouped`` trains documents of one key next to each other, groups in random order; ``weighted`` deals the
            tokens of several sources, which the keys name, by ``weights`` for as long as each lasts, and every document
            once. Rows are ``mixed`` inside stages (of at most 64 rows where the order defines none), so the order
            holds from stage to stage and not within one; documents of a stage's emptiest row move on to the next
            stage. ``seed`` draws what the order leaves open.
        keys: [N] the key of each document, a number or a text: what to sort by, the group, or the source.
        weights: key -> share of the tokens under ``weighted``.

    Returns:
        The plan. Documents dropped or truncated are listed in it.

    Raises:
        CapacityError: a document is longer than ``capacity`` under ``overflow="error"``, or nothing is left to
            pack.
        PackingError: any other argument makes no sense.
    """
    rule = RowRule.of(
        capacity,
        strategy=strategy,
        overflow=overflow,
        context=context,
        min_piece=min_piece,
        max_segments=max_segments,
        order=order,
        keys=keys,
        weights=weights,
    )
    if rule.equal_cost:
        raise PackingError("a plan has no steps, so equal_cost=True has no effect: use plan_epoch, or leave it out")
    shuffle = None if (seed := check_seed(seed)) is None else np.random.PCG64(seed)
    lengths = check_lengths(lengths)
    ordered = OrderRule.checked(rule.order, rule.keys, rule.weights, len(lengths))
    with within_memory("the rows of the plan", "plan fewer documents at a time, or raise the capacity"):
        pieces = rule.cut(lengths)
        sizes = pieces.length
        if rule.order != "random":
            rows = ordered_rows(ordered.of_pieces(pieces.source), sizes, rule.capacity, rule.max_segments, shuffle)
        else:
            most = min(rule.max_segments or len(sizes), len(sizes))
            rows = _STRATEGIES[rule.strategy](sizes, rule.capacity, most, shuffle)
        return plan_of(rule, pieces, rows, len(lengths))


def plan_of(rule: RowRule, pieces: Pieces, rows: RowAssignment, documents: int) -> PackPlan:
    """Writes rows of the pieces of so many documents down as a plan."""
    return PackPlan(
        rows.offsets,
        rows.order if pieces.source is None else pieces.source[rows.order],
        np.zeros(len(rows.order), np.int64) if pieces.start is None else pieces.start[rows.order],
        rows.sizes,
        capacity=rule.capacity,
        n_documents=documents,
        dropped=pieces.dropped,
        truncated=pieces.truncated,
        context=_NO_CONTEXT if pieces.context is None else pieces.context[rows.order],
        restarts=pieces.context is not None and rule.overflow == "restart",
        check=False,
    )


_NO_CONTEXT = np.zeros(0, np.int64)
_STRATEGIES: dict[str, Callable[[Int64, int, int, Shuffle], RowAssignment]] = {
    "best_fit": assignment.best_fit,
    "mixed": mixed,
    "first_fit": assignment.first_fit,
    "sequential": assignment.sequential,
}
