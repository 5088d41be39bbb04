"""Replacements for the convolution and the scan of a mixer's modeling file in a packed forward.

x and the segments, as the layer passes them on -> :func:`convolve`, :func:`scan` -> ``ops.conv``, ``ops.scan``. Where
documents are cut over ranks, by way of ``context_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import UnsupportedModelError
from torch_backend.context_parallel.recurrent import (
    HEADS,
    WHOLE,
    convolve_pieces,
    heads_divide,
    scan_by_heads,
    scan_whole,
)
from torch_backend.context_parallel.share import RankShare
from torch_backend.context_parallel.states import STATES, scan_by_states
from torch_backend.hf.anatomy.families import CONVOLUTION, STATE_ARGUMENTS
from torch_backend.hf.entry import THREAD
from torch_backend.hf.forward import TRITON_SCAN
from torch_backend.ops import scan as scans
from torch_backend.ops.conv import short_convolution
from torch_backend.ops.document_batches import per_document
from torch_backend.ops.forests import tails
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.scan import ScanChoice
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.ops.scan.halves import HalvedScan
from torch_backend.ops.scan.linear_attention import halves as linear
from torch_backend.ops.scan.selective import operators as selective
from torch_backend.segments import PackedMetadata


class LayerSegments:
    """The segments as one layer passes them to its convolution and scan, and what its scan ran on.

    Attributes:
        packed: the segments.
        context: what this rank holds of documents that are cut over ranks; None where none are.
        scan: what the layer's scan ran on; None until it ran.
        crossing: how it crossed ranks; None until it did.
    """

    def __init__(self, packed: PackedMetadata, context: RankShare | None = None) -> None:
        self.packed = packed
        self.context = context
        self.scan: ScanChoice | None = None
        self.crossing: str | None = None


def _segments_of(function: str, arguments: dict[str, Any]) -> LayerSegments:
    """The segments among the keywords of a convolution or scan.

    Raises:
        UnsupportedModelError: there are none, or a state goes in or out.
    """
    found = next((value for value in arguments.values() if isinstance(value, LayerSegments)), None)
    if found is None:
        raise UnsupportedModelError(
            f"a layer called {function} without its segments: its documents would see each other"
        )
    if any(arguments.get(name) is not None and arguments[name] is not False for name in STATE_ARGUMENTS):
        raise UnsupportedModelError(
            f"a layer called {function} with a state, but packed documents start from none: call it without a cache"
        )
    return found


def convolve(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """The causal convolution of each channel, restarted at every segment, and its activation.

    Args:
        function: what the modeling file calls by the name; used where Triton does not run.
        x: [B, C, S], rows whose tokens the segments cover.
        weight: [C, W], bias: [C].
        activation: a name that transformers knows.
        others: the segments are among them.

    Returns:
        [B, C, S], dtype of x.
    """
    segments = _segments_of(CONVOLUTION, others)
    if runs_triton(x) and activation in (None, "silu", "swish"):
        return convolve_by_triton(segments, x, weight, bias, silu=activation is not None)
    tokens = x.transpose(1, 2)
    if segments.context is not None:

        def of_pieces(flat: Tensor, packed: PackedMetadata) -> Tensor:
            return convolve(function, flat.T[None], weight, bias, activation, segments=LayerSegments(packed))[0].T

        return _convolve_across_ranks(segments.context, tokens, weight.shape[-1], of_pieces).transpose(1, 2)
    packed = segments.packed
    if packed.parents is not None:
        unfolded = tails(packed, weight.shape[-1])

        def on_tails(flat: Tensor) -> Tensor:
            unshared = LayerSegments(unfolded.packed)
            return convolve(function, flat.T[None], weight, bias, activation, segments=unshared)[0].T

        return unfolded.run(on_tails, tokens.flatten(0, 1)).view(tokens.shape).transpose(1, 2)

    def alone(documents: Tensor) -> Tensor:
        return function(documents.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

    together: Tensor = per_document(packed, alone, (tokens,), {})
    return together.transpose(1, 2)


def convolve_by_triton(
    segments: LayerSegments, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False
) -> Tensor:
    """:func:`torch_backend.ops.conv.short_convolution` of a layer, [B, C, S] -> [B, C, S]."""

    def on_row(flat: Tensor, packed: PackedMetadata) -> Tensor:
        return short_convolution(flat, weight, packed, bias=bias, silu=silu)

    tokens = x.transpose(1, 2)
    if segments.context is not None:
        return _convolve_across_ranks(segments.context, tokens, weight.shape[-1], on_row).transpose(1, 2)
    return on_row(tokens.flatten(0, 1), segments.packed).view(tokens.shape).transpose(1, 2)


@torch.compiler.disable  # each batch has other pieces, which a graph would be made of anew
def _convolve_across_ranks(
    share: RankShare, tokens: Tensor, width: int, convolved: Callable[[Tensor, PackedMetadata], Tensor]
) -> Tensor:
    """[1, T, C] -> [1, T, C]. Between compiled graphs, gradients of [1, C, T] would be transposed in memory, twice."""
    return convolve_pieces(tokens[0], share, width, convolved)[None]


def scan(name: str, function: Callable[..., Any], libraries: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """The scan that a modeling file calls by a name, with its state restarted at every segment: see ``ops.scan``."""
    segments = _segments_of("a scan", kwargs)
    kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, LayerSegments)}

    def run(packed: PackedMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = name, function, libraries, packed, args, kwargs
        segments.scan = scans.choose(*call)
        return scans.run(segments.scan, *call)

    if segments.context is None:
        return run(segments.packed, args, kwargs)
    return _scan_across_ranks(segments, args, kwargs, run)


@torch.compiler.disable
def _scan_across_ranks(
    segments: LayerSegments, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
) -> Any:
    share = segments.context
    assert share is not None
    by_heads = heads_divide(share, args, kwargs)
    if share.straddles:
        segments.crossing = HEADS if by_heads else WHOLE
    return (scan_by_heads if by_heads else scan_whole)(share, args, kwargs, run)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> Tensor:
    """Mamba's selective scan of the running layer, its state restarted at every segment.

    Args:
        x, dt, z: [B, E, S]; A: [E, N]; B, C: [B, N, S]; D, delta_bias: [E].
        others: what selects other code for the same result.

    Returns:
        [B, E, S], dtype of x.
    """
    segments: LayerSegments = THREAD.segments  # a modeling file calls it without them
    rows = x.transpose(1, 2)
    on_row, step, b, c = (y.transpose(1, 2).flatten(0, 1) for y in (x, dt, B, C))
    gate = None if z is None else z.transpose(1, 2).flatten(0, 1)
    step = step.float() if delta_bias is None else step.float() + delta_bias.float()
    step = F.softplus(step) if delta_softplus else step
    y = diagonal_scan(segments, step * on_row.float(), step, A, b, c)
    return selective.finished(y, on_row, D, gate).view(rows.shape).transpose(1, 2)


def diagonal_scan(segments: LayerSegments, u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """:func:`torch_backend.ops.scan.selective.operators.diagonal_scan` of a layer."""
    segments.scan = TRITON_SCAN
    if segments.context is None:
        return selective.diagonal_scan(u, g, A, B, C, segments.packed)
    return _scan_by_states(segments, selective.HALVES, (u, g, B, C), (A,))


def decayed_scan(segments: LayerSegments, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Linear attention with a decay, not scaled, of a layer: see :func:`gated_delta_rule`."""
    segments.scan = TRITON_SCAN
    if segments.context is None:
        return gated_delta_rule(q, k, v, g, None, segments.packed, scale=1.0)
    return _scan_by_states(segments, linear.HALVES, (q.to(v.dtype), k.to(v.dtype), v, g))


@torch.compiler.disable
def _scan_by_states(
    segments: LayerSegments, halves: HalvedScan, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...] = ()
) -> Tensor:
    share = segments.context
    assert share is not None
    if share.straddles:
        segments.crossing = STATES
    return scan_by_states(share, halves, inputs, parameters)


def no_fused_steps(*args: Any, **kwargs: Any) -> None:
    """Placeholder for the fused convolution-and-scan function. Returns None, so the layer runs the steps separately."""
