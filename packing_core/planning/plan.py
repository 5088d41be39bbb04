"""Lengths in, PackPlan out: which document goes into which row. No tokens pass through here.

``plan`` checks and cuts the lengths (``pieces``), packs them into rows (``assignment``, ``bins``) and writes those down
as a ``PackPlan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core.errors import PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning import assignment
from packing_core.planning.assignment import RowAssignment, Shuffle
from packing_core.planning.mixed import mixed
from packing_core.planning.order import Order, OrderRule, ordered_rows
from packing_core.planning.packplan import PackPlan
from packing_core.planning.pieces import (
    Overflow,
    OverflowRule,
    check_alignment,
    check_lengths,
    check_seed,
    choice,
    positive,
)

__all__ = ["Effort", "Order", "Overflow", "PackPlan", "Strategy", "plan"]

Int64 = NDArray[np.int64]
Strategy = Literal["best_fit", "mixed", "first_fit", "sequential"]
Effort = Literal["fast", "max"]


@hinted()
def plan(
    lengths: ArrayLike,
    capacity: int,
    *,
    strategy: Strategy | None = None,
    effort: Effort = "fast",
    overflow: Overflow = "error",
    context: int | None = None,
    min_piece: int = 1,
    max_segments: int | None = None,
    alignment: int = 1,
    seed: int | None = 0,
    window: int | None = None,
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
        capacity: tokens a row can hold.
        strategy: None, the default, is ``mixed``, and ``best_fit`` under ``effort="max"``. ``mixed`` makes rows whose
            lengths look like a random draw: it fills rows with documents in random order and their ends with the
            longest documents that still fit; rows are at least 99.9% full or, where those of ``best_fit`` are not, at
            most 0.5% more of them (exact definition: :func:`.mixed.mixed`). ``best_fit`` takes documents by
            decreasing length and puts each into the fullest row that takes it (best-fit-decreasing): rows of one length
            class. ``first_fit`` puts documents by decreasing length into the earliest opened row that takes them
            (first-fit-decreasing); ``sequential`` keeps the order of the documents and closes a row when the next one
            does not fit (next fit).
        effort: ``max`` improves on ``best_fit`` by column generation where that misses the lower bound by more than
            0.5%, at the cost of up to a second; the plan never gets worse. It takes no other strategy.
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
        alignment: every piece starts at a multiple of this within its row; it must divide ``capacity``.
        seed: shuffles the finished rows, so that planning order is not training order; None keeps the planner's.
            Under ``mixed`` it also draws the documents; None takes them in their own order as the draw.
        window: packs this many documents at a time, after shuffling the documents by ``seed``; rows are then shuffled
            inside their window only. None packs all at once.
        order: the order of the rows. ``random`` is that of ``seed``. The others keep to an order of the documents:
            ``curriculum`` trains short pieces first, in stages of one octave of length (65 to 128 tokens, 129 to 256),
            whose rows have the same tokens and ever fewer documents; ``sorted`` follows the ``keys``, smallest first;
            ``grouped`` trains documents of one key next to each other, groups in random order; ``weighted`` deals the
            tokens of several sources, which the keys name, by ``weights`` for as long as each lasts, and every document
            once. Documents see each other under none of them. Rows are ``mixed`` inside stages, of at most 64 rows
            where the order names none, so they follow the order up to a stage; the emptiest row of each moves on to
            the next. ``seed`` draws what the order leaves open.
        keys: [N] the key of each document, a number or a text: what to sort by, the group, or the source.
        weights: key -> share of the tokens under ``weighted``.

    Returns:
        The plan. Documents dropped or truncated are listed in it.

    Raises:
        CapacityError: a document is longer than ``capacity`` under ``overflow="error"``, ``alignment`` does not divide
            ``capacity``, or nothing is left to pack.
        PackingError: any other argument makes no sense.
    """
    capacity, alignment = positive("capacity", capacity), positive("alignment", alignment)
    check_alignment(capacity, alignment)
    choice("effort", effort, ("fast", "max"))
    if strategy is None:
        strategy = "best_fit" if effort == "max" else "mixed"
    choice("strategy", strategy, _STRATEGIES)
    if effort == "max" and strategy != "best_fit":
        raise PackingError(
            f'effort="max" improves on strategy="best_fit" and cannot be combined with {strategy!r}: leave strategy out'
        )
    limit = None if max_segments is None else positive("max_segments", max_segments)
    shuffle = None if (seed := check_seed(seed)) is None else np.random.PCG64(seed)
    rule = OverflowRule.checked(capacity, overflow, context, min_piece)
    lengths = check_lengths(lengths)
    ordered = OrderRule.checked(order, keys, weights, len(lengths))
    if order != "random" and (strategy != "mixed" or window is not None):
        given = f"strategy={strategy!r}" if strategy != "mixed" else f"window={window!r}"
        raise PackingError(f'order="{order}" packs mixed rows in stages of its own: leave {given} out')
    with within_memory("the rows of the plan", "plan fewer documents at a time, or raise the capacity"):
        pieces = rule.cut(lengths)
        sizes = pieces.length if alignment == 1 else -(-pieces.length // alignment)

        def pack(sizes: Int64) -> RowAssignment:
            packer = assignment.fewest if effort == "max" else _STRATEGIES[strategy]
            return packer(sizes, capacity // alignment, min(limit or len(sizes), len(sizes)), shuffle)

        if order != "random":
            rule_of_pieces = ordered.of_pieces(pieces.source)
            rows = ordered_rows(rule_of_pieces, pieces.length, capacity, limit, shuffle, alignment=alignment)
        else:
            rows = pack(sizes) if window is None else _windows(pack, sizes, positive("window", window), shuffle)
        return PackPlan(
            rows.offsets,
            rows.order if pieces.source is None else pieces.source[rows.order],
            np.zeros(len(rows.order), np.int64) if pieces.start is None else pieces.start[rows.order],
            rows.sizes if alignment == 1 else pieces.length[rows.order],
            capacity=capacity,
            n_documents=len(lengths),
            alignment=alignment,
            dropped=pieces.dropped,
            truncated=pieces.truncated,
            context=_NO_CONTEXT if pieces.context is None else pieces.context[rows.order],
            restarts=pieces.context is not None and overflow == "restart",
            check=False,
        )


def _windows(pack: Callable[[Int64], RowAssignment], sizes: Int64, window: int, shuffle: Shuffle) -> RowAssignment:
    """``pack`` on ``window`` pieces at a time, in an order shuffled before."""
    taken = np.arange(len(sizes)) if shuffle is None else assignment.permutation(len(sizes), shuffle)
    packed = []
    for begin in range(0, len(sizes), window):
        chosen = taken[begin : begin + window]
        rows = pack(sizes[chosen])
        packed.append((rows.offsets[1:] + begin, chosen[rows.order], rows.sizes))
    offsets, order, sizes = map(np.concatenate, zip(*packed))
    return RowAssignment(np.concatenate([np.zeros(1, np.int64), offsets]), order, sizes)


_NO_CONTEXT = np.zeros(0, np.int64)
_STRATEGIES: dict[str, Callable[[Int64, int, int, Shuffle], RowAssignment]] = {
    "best_fit": assignment.best_fit,
    "mixed": mixed,
    "first_fit": assignment.first_fit,
    "sequential": assignment.sequential,
}
