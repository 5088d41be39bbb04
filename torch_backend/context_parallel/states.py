"""Scans that hand their states on between the pieces of a document, each on the rank that holds it.

    pieces from zero -> their last states and the sums of their gates -> the ranks that continue their documents
                     -> the state before each piece -> the pieces again, from these states

The last state of each piece, faded by the gates in between, comes to those behind it, and the state before a piece is
the sum of what comes: no rank waits for another's scan. It takes a scan whose states fade by gates alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_backend.context_parallel.exchange import exchanged
from torch_backend.context_parallel.share import RankShare, straddling_pieces
from torch_backend.ops.repeated import repeated
from torch_backend.segments import PackedMetadata, host_lengths, to_device

STATES = "straddling documents hand states on"


class Recurrence(NamedTuple):
    """A scan of inputs [T, ...], with parameters.

    Attributes:
        scan: (*inputs, *parameters, segments) -> [T, ...], from zero before each of S segments.
        with_states: the same, and ``initial=`` [S, ...] or None -> [T, ...], and the last states [S, ...].
        fade: (states [k, ...], sums of gates [k, ...], *parameters) -> what is left of the states after such gates.
        gates: which of the inputs holds the logs of the decays.
    """

    scan: Callable[..., Tensor]
    with_states: Callable[..., tuple[Tensor, Tensor]]
    fade: Callable[..., Tensor]
    gates: int


@dataclass(frozen=True)
class StateLayout:
    """The last states that ranks need of each other.

    Attributes:
        pieces: segments of the rank's pieces of straddling documents; None without one.
        sent: int64, those of them whose states are sent, by receiving rank, which may be this one.
        send, receive: states to and from each rank.
        earlier: for each of the pieces int64 [k]: which of the received states are those of its document's earlier
            pieces, in their order.
    """

    pieces: PackedMetadata | None
    sent: Tensor
    send: list[int]
    receive: list[int]
    earlier: list[Tensor]


def state_layout(share: RankShare) -> StateLayout:
    """The layout of a rank, made once for a batch."""
    return share.derived("states", lambda: _layout(share))


def _layout(share: RankShare) -> StateLayout:
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
    lengths = plan.length[own].tolist()
    return StateLayout(
        pieces=PackedMetadata.from_lengths(lengths, device=share.device) if lengths else None,
        sent=_on(share, np.array([own.index(piece) for pieces in sent for piece in pieces], np.int64)),
        send=[len(pieces) for pieces in sent],
        receive=[len(pieces) for pieces in received],
        earlier=earlier,
    )


def _on(share: RankShare, x: Any) -> Tensor:
    return to_device(torch.from_numpy(x), share.device)


def scan_by_states(
    share: RankShare, recurrence: Recurrence, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()
) -> Tensor:
    """A scan of the rank's tokens, each piece of a document from the state in which the one before it ended.

    Args:
        share: what the rank holds.
        recurrence: the scan.
        inputs: [T, ...] each.
        parameters: what the scan takes beside them.

    Returns:
        [T, ...]. Gradients flow between the ranks.
    """
    if not share.straddles:
        return recurrence.scan(*inputs, *parameters, share.segments)
    whole, layout, count = share.whole, state_layout(share), len(inputs)
    alone = [x.index_select(0, whole.alone) for x in inputs]
    pieces = [x.index_select(0, whole.straddling) for x in inputs]
    ends, shapes = inputs[0].new_empty(0), list[torch.Size]()
    if layout.pieces is not None:
        _, last = recurrence.with_states(*pieces, *parameters, layout.pieces)
        gates = pieces[recurrence.gates].to(last.dtype).split(host_lengths(layout.pieces))
        sums = torch.stack([x.sum(0) for x in gates])
        shapes = [last.shape[1:], sums.shape[1:]]
        ends = repeated(torch.cat([last.flatten(1), sums.flatten(1)], 1), layout.sent)
    ends, others = exchanged(ends, layout.send, layout.receive, share.group, *alone, *pieces, *parameters)
    alone, pieces, parameters = list(others[:count]), list(others[count : 2 * count]), others[2 * count :]
    found = [] if whole.own is None else [recurrence.scan(*alone, *parameters, whole.own)]
    if layout.pieces is not None:
        initial = [_before(repeated(ends, places), shapes, recurrence, parameters) for places in layout.earlier]
        found.append(recurrence.with_states(*pieces, *parameters, layout.pieces, initial=torch.stack(initial))[0])
    return torch.cat(found).index_select(0, whole.inverse)


def _before(earlier: Tensor, shapes: list[torch.Size], recurrence: Recurrence, parameters: Sequence[Tensor]) -> Tensor:
    """The state before a piece, of the last states and the sums of gates [k, ...] of the pieces before it."""
    last, sums = (
        x.unflatten(1, shape) for x, shape in zip(earlier.split([x.numel() for x in shapes], 1), shapes, strict=True)
    )
    behind = sums.flip(0).cumsum(0).flip(0)  # each with those that follow
    between = torch.cat([behind[1:], torch.zeros_like(sums[:1])])
    return recurrence.fade(last, between, *parameters).sum(0)
