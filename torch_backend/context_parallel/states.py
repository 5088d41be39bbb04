"""Scans that hand their states on between the pieces of a document, each on the rank that holds it.

    forward    inputs -> last states and sums of gates -> the ranks that continue the documents
                      -> states before the pieces -> outputs
    backward   gradients of outputs -> those of the states before the pieces -> the ranks that hold what is before
                                    -> those of the last states -> gradients of inputs and parameters

The last state of each piece, faded by the gates in between, comes to those behind it, and the state before a piece is
the sum of what comes: no rank waits for another's scan. Gradients go back the same way, faded by the same gates. It
takes a scan whose states fade by gates alone, in two halves with the exchange in between
(:mod:`torch_backend.ops.scan.halves`). Autograd keeps the inputs as they were given, without a copy, and states; the
backward takes the pieces from among the rank's tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.context_parallel.exchange import copy_runs, exchanged
from torch_backend.context_parallel.share import RankShare, TokenRun, straddling_pieces
from torch_backend.ops.scan.halves import HalvedScan
from torch_backend.segments import PackedMetadata, host_lengths, to_device

STATES = "straddling documents hand states on"


@dataclass(frozen=True)
class ScannedRow:
    """Some of the rank's pieces as a row of their own.

    Attributes:
        runs: from the rank's tokens to the row.
        packed: the segments of the row: the pieces, with their padding.
        moves: whether the row is another than that of all of the rank's tokens.
    """

    runs: list[TokenRun]
    packed: PackedMetadata
    moves: bool

    def taken(self, x: Tensor) -> Tensor:
        """The row's part of x [T, ...], contiguous, zeros for padding. No copy of what is the row already."""
        if not self.moves:
            return x.contiguous()
        row = x.new_zeros(self.packed.tokens, *x.shape[1:])
        copy_runs(self.runs, x, row)
        return row

    def put(self, row: Tensor, x: Tensor | None, tokens: int) -> Tensor:
        """x [T, ...] with the row's part of it, or new memory where there is no x yet; the row itself if it is x."""
        if not self.moves:
            return row
        x = row.new_empty(tokens, *row.shape[1:]) if x is None else x
        copy_runs([TokenRun(run.target, run.source, run.tokens) for run in self.runs], row, x)
        return x


@dataclass(frozen=True)
class StateLayout:
    """The rows that a rank scans, and the last states that ranks need of each other.

    Attributes:
        alone: the documents on this rank alone; None without one.
        pieces: the pieces of straddling documents, each padded to whole chunks; None without one.
        sent: int64, those of the pieces whose states are sent, by receiving rank, which may be this one.
        send, receive: states to and from each rank.
        earlier: for each of the pieces int64 [k]: which of the received states are those of its document's earlier
            pieces, in their order.
    """

    alone: ScannedRow | None
    pieces: ScannedRow | None
    sent: Tensor
    send: list[int]
    receive: list[int]
    earlier: list[Tensor]


def state_layout(share: RankShare, chunk: int) -> StateLayout:
    """The layout of a rank for chunks of so many tokens, made once for a batch."""
    return share.derived(("states", chunk), lambda: _layout(share, chunk))


def _layout(share: RankShare, chunk: int) -> StateLayout:
    plan, everyone = share.plan, range(share.ranks)
    pieces_on = [straddling_pieces(plan, rank).tolist() for rank in everyone]
    own = pieces_on[share.rank]

    def wanted(source: int, target: int) -> list[int]:
        """The pieces of a rank that another one continues."""
        last = {int(plan.document[piece]): int(plan.start[piece]) for piece in pieces_on[target]}
        return [piece for piece in pieces_on[source] if plan.start[piece] < last.get(int(plan.document[piece]), 0)]

    sent = [wanted(share.rank, rank) for rank in everyone]
    received = [wanted(rank, share.rank) for rank in everyone]
    arrived = np.array([piece for pieces in received for piece in pieces], np.int64)
    earlier = []
    for piece in own:
        before = (plan.document[arrived] == plan.document[piece]) & (plan.start[arrived] < plan.start[piece])
        places = np.flatnonzero(before)
        earlier.append(_on(share, places[np.argsort(plan.start[arrived[places]])]))
    straddles = plan.straddling[plan.document[share.pieces]]
    return StateLayout(
        alone=_row(share, ~straddles, 1),
        pieces=_row(share, straddles, chunk),
        sent=_on(share, np.array([own.index(piece) for pieces in sent for piece in pieces], np.int64)),
        send=[len(pieces) for pieces in sent],
        receive=[len(pieces) for pieces in received],
        earlier=earlier,
    )


def _row(share: RankShare, chosen: NDArray[np.bool_], multiple: int) -> ScannedRow | None:
    """The chosen ones of the rank's pieces, each padded to a multiple of so many tokens."""
    if not chosen.any():
        return None
    all_lengths = np.array(share.lengths)
    lengths = all_lengths[chosen]
    padded = -(-lengths // multiple) * multiple
    source, target = (np.cumsum(all_lengths) - all_lengths)[chosen], np.cumsum(padded) - padded
    apart = (np.diff(source) != lengths[:-1]) | (np.diff(target) != lengths[:-1])
    first = np.flatnonzero(np.append(True, apart))
    columns = source[first], target[first], np.add.reduceat(lengths, first)
    runs = [TokenRun(*run) for run in zip(*(column.tolist() for column in columns), strict=True)]
    packed = PackedMetadata.from_lengths(padded.tolist(), device=share.device)
    return ScannedRow(runs, packed, moves=not chosen.all() or bool((padded > lengths).any()))


def _on(share: RankShare, x: Any) -> Tensor:
    return to_device(torch.from_numpy(x), share.device)


def scan_by_states(
    share: RankShare, scan: HalvedScan, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()
) -> Tensor:
    """A scan of the rank's tokens, each piece of a document from the state in which the one before it ended.

    Args:
        share: what the rank holds.
        scan: in halves.
        inputs: [T, ...] each.
        parameters: what the scan takes beside them.

    Returns:
        [T, ...]. Gradients flow between the ranks. Every rank of the group takes part in the forward and in the
        backward, whether it holds a piece or not, if any document straddles ranks.
    """
    out: Tensor = _ScanByStates.apply(share, scan, len(inputs), *inputs, *parameters)
    return out


class _ScanByStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        share, scan, inputs, *operands = arguments
        layout, tokens = state_layout(share, scan.chunk(operands)), len(operands[0])
        y: Tensor | None = None
        of_alone: Sequence[Tensor] = ()
        of_pieces: Sequence[Tensor] = ()
        between: Sequence[Tensor] = ()
        with torch.cuda.device_of(operands[0]):  # Triton starts kernels on the current device
            if layout.alone is not None:
                row = _taken(layout.alone, operands, inputs)
                found, of_alone = scan.forward(row, layout.alone.packed)
                y = layout.alone.put(found, y, tokens)
            ends = operands[0].new_empty(0)
            if layout.pieces is not None:
                packed, row = layout.pieces.packed, _taken(layout.pieces, operands, inputs)
                work, last = scan.begin(row, packed)
                sums = torch.stack([x.sum(0, dtype=last.dtype) for x in row[scan.gates].split(host_lengths(packed))])
                ends = torch.cat([last.flatten(1), sums.flatten(1)], 1).index_select(0, layout.sent)
            if share.straddles:
                ends = exchanged(ends, layout.send, layout.receive, share.group)
            if layout.pieces is not None:
                states, gates = ends.split([last[0].numel(), sums[0].numel()], 1)
                states, gates = states.unflatten(1, last.shape[1:]), gates.unflatten(1, sums.shape[1:])
                between = [_between(gates[places]) for places in layout.earlier]
                pairs = zip(layout.earlier, between, strict=True)
                initial = torch.stack([scan.fade(states[places], faded, operands).sum(0) for places, faded in pairs])
                found, of_pieces = scan.finish(row, packed, work, initial)
                y = layout.pieces.put(found, y, tokens)
        assert y is not None
        kept = operands, of_alone, of_pieces, between
        ctx.call, ctx.counts = (share, scan, inputs), [len(each) for each in kept]
        ctx.save_for_backward(*(x for each in kept for x in each))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (share, scan, inputs), saved = ctx.call, iter(ctx.saved_tensors)
        operands, of_alone, of_pieces, between = ([next(saved) for _ in range(count)] for count in ctx.counts)
        layout, tokens = state_layout(share, scan.chunk(operands)), len(dy)
        totals: list[Tensor | None] = [None] * len(operands)

        def add(part: ScannedRow, gradients: Sequence[Tensor]) -> None:
            for i, (gradient, total) in enumerate(zip(gradients, totals, strict=True)):
                if i < inputs:
                    totals[i] = part.put(gradient, total, tokens)
                else:
                    totals[i] = gradient if total is None else total + gradient

        if layout.alone is not None:
            row = _taken(layout.alone, operands, inputs)
            add(layout.alone, scan.backward(row, layout.alone.packed, of_alone, layout.alone.taken(dy)))
        returned = dy.new_empty(0)
        if layout.pieces is not None:
            packed, row, drow = layout.pieces.packed, _taken(layout.pieces, operands, inputs), layout.pieces.taken(dy)
            work, dinitial = scan.begin_backward(row, packed, of_pieces, drow)
            returned = dinitial.new_zeros(sum(layout.receive), *dinitial.shape[1:])
            for d, places, gates in zip(dinitial, layout.earlier, between, strict=True):
                returned[places] += scan.fade(d.expand(len(places), *d.shape), gates, operands)
        if share.straddles:
            returned = exchanged(returned, layout.receive, layout.send, share.group)
        if layout.pieces is not None:
            # on a GPU, accumulating index_put_ sorts the indexes, where index_add_ uses atomics
            dfinal = torch.zeros_like(dinitial).index_put_((layout.sent,), returned, accumulate=True)
            add(layout.pieces, scan.finish_backward(row, packed, of_pieces, drow, work, dfinal))
        return None, None, None, *totals


def _taken(part: ScannedRow, operands: Sequence[Tensor], inputs: int) -> list[Tensor]:
    """The row's part of the inputs, and the parameters."""
    return [*(part.taken(x) for x in operands[:inputs]), *(x.contiguous() for x in operands[inputs:])]


def _between(sums: Tensor) -> Tensor:
    """The sums of the gates between each of the pieces before one and that one, of those of the pieces [k, ...]."""
    behind = sums.flip(0).cumsum(0).flip(0)  # each with those that follow
    return torch.cat([behind[1:], torch.zeros_like(sums[:1])])
