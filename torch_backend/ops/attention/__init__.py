"""Packed attention: one entry point, one table of implementations, one selection loop.

``attention(q, k, v, packed)`` checks its input once, describes it as an :class:`AttentionRequest`, and asks
implementations in turn whether they serve it. Each implementation is one object in a file of its own: a new one is a
new file and a line in ``IMPLEMENTATIONS``. Data flows ``[T, H, D]`` in, ``[T, H, Dv]`` out, rows already flattened.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.attention.order import CPU, CUDA, last_resort, order
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)

# name -> where its object lives; imported when it is first asked
IMPLEMENTATIONS = {
    "flash4": "torch_backend.ops.attention.flash:FLASH4",
    "flash3": "torch_backend.ops.attention.flash:FLASH3",
    "flash2": "torch_backend.ops.attention.flash:FLASH2",
    "triton": "torch_backend.ops.attention.triton:TRITON",
    "varlen": "torch_backend.ops.attention.varlen:VARLEN",
    "flex": "torch_backend.ops.attention.flex:FLEX",
    "xformers": "torch_backend.ops.attention.xformers:XFORMERS",
    "sdpa": "torch_backend.ops.attention.sdpa:SDPA",
    "reference": "torch_backend.ops.attention.reference:REFERENCE",
}


@dataclass(frozen=True)
class AttentionRequest:
    """Everything about one attention call that decides who can serve it; holds no tensor and no value of one.

    Attributes:
        tokens, heads, kv_heads, head_dim, value_dim: T, H, K, D, Dv.
        dtype, device: of q, k and v.
        segments, max_seqlen: of the metadata; ``segments`` counts the zero-length ones that pad ``cu_seqlens``.
        host_lengths: whether the segment lengths are known on the host.
        requires_grad: whether a backward may follow.
        causal, window, softcap, dropout, scale: as in :func:`attention`, ``scale`` resolved.
        sinks, alibi: whether those tensors are given.
        compiling: whether torch.compile is tracing the call.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    segments: int
    max_seqlen: int
    host_lengths: bool
    requires_grad: bool
    causal: bool
    window: int | None
    softcap: float | None
    sinks: bool
    alibi: bool
    dropout: float
    scale: float
    compiling: bool


class Implementation(Protocol):
    """What an entry of ``IMPLEMENTATIONS`` is.

    Attributes:
        host_lengths: it needs ``packed.lengths``; the collator then carries them.
        fixed_shapes: one compiled graph serves every segmentation that has the same T, N and ``max_seqlen``.

    One that derives something from the segments may have ``prepare(packed, request)``, which does so ahead of layers
    that are compiled. One that serves some requests only by building score matrices may have ``last_resort(request)``,
    which says so in one clause, or None: "auto" then tries it after all others.
    """

    host_lengths: bool
    fixed_shapes: bool

    def supports(self, request: AttentionRequest) -> str | None:
        """None, or in one clause why the request cannot be served (library absent, wrong device, no such option)."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedMetadata,
        request: AttentionRequest,
        *,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        """Attention of a request that :meth:`supports` accepted; shapes and dtypes were checked by the caller."""
        ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMetadata,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    implementation: str | Sequence[str] = "auto",
) -> Tensor:
    """Attention in which no token sees another segment: scale, softcap, ALiBi, mask, softmax with the sinks.

    Args:
        q: [T, H, D] queries.
        k: [T, K, D] keys; H is a multiple of K.
        v: [T, K, Dv] values; Dv may differ from D.
        packed: the segments; they cover all T tokens.
        causal: key j is visible to query i only if j <= i.
        window: visible keys per query, its own included: key j is visible iff i - j < window.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: [H] one logit per head that joins the denominator only.
        alibi_slopes: [H] non-negative slopes; the logit of query i and key j gets ``-slope * |i - j|``.
        dropout: probability of dropping an attention weight.
        scale: of the logits; ``D ** -0.5`` if None.
        implementation: "auto", a name of ``IMPLEMENTATIONS``, or names of which the first that serves is taken.

    Returns:
        [T, H, Dv], dtype of q.

    Raises:
        LayoutError: shapes, dtypes or devices contradict each other.
        UnsupportedError: no implementation asked for can serve the request; each one's reason is in the message.
    """
    request = _describe(q, k, v, packed, causal, window, softcap, sinks, alibi_slopes, dropout, scale)
    if not request.compiling:
        packed.last_request = request
    chosen = select(request, implementation)
    return _load(chosen)(q, k, v, packed, request, sinks=sinks, alibi_slopes=alibi_slopes)


def select(request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> str:
    """The name of the first implementation that serves ``request``; for a named one nothing stands in."""
    reasons: dict[str, str] = {}
    for name in _asked(request, implementation):
        reason = _load(name).supports(request)
        if reason is None:
            if implementation == "auto" and not request.compiling:
                _log_choice(request.device.type, name, tuple(reasons.items()))
            return name
        reasons[name] = reason
    refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(
        f"no packed attention for {describe(request)}: {refused}. "
        f'Pass implementation="auto" or another of {", ".join(IMPLEMENTATIONS)}'
    )


def prepare(packed: PackedMetadata, request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> None:
    """Derive from the segments what layers that ask like ``request`` share, before they run.

    A compiled layer that found nothing derived would have a graph of its own in which it is. The request may be one
    of an earlier batch.
    """
    segments = packed.cu_seqlens.shape[0] - 1
    request = replace(
        request,
        tokens=packed.tokens,
        segments=segments,
        max_seqlen=packed.max_seqlen,
        host_lengths=packed.lengths is not None,
        compiling=True,
    )
    make = getattr(_load(select(request, implementation)), "prepare", None)
    if make is not None:
        make(packed, request)


def rejections(request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> dict[str, str | None]:
    """Every candidate in the order it is tried, with the reason it is not chosen, or None where it can be.

    The reason is why it cannot serve ``request`` or, where "auto" has found another that serves, why it is tried last.
    """
    reasons: dict[str, str | None] = {}
    for name in _asked(request, implementation):
        reason = _load(name).supports(request)
        if reason is None and implementation == "auto" and None in reasons.values():
            why = last_resort(_load(name), request)
            reason = None if why is None else f"tried last, because {why}"
        reasons[name] = reason
    return reasons


def describe(request: AttentionRequest) -> str:
    """The request in a few words, for error messages and ``explain``."""
    options = [
        "causal" if request.causal else "not causal",
        request.window is not None and f"window {request.window:,}",
        request.softcap is not None and f"softcap {request.softcap:g}",
        request.sinks and "sinks",
        request.alibi and "ALiBi",
        request.dropout > 0 and f"dropout {request.dropout:g}",
    ]
    return (
        f"{request.heads} heads ({request.kv_heads} of keys) of {request.head_dim} ({request.value_dim} of values), "
        f"{str(request.dtype).removeprefix('torch.')} on {request.device.type}, {', '.join(o for o in options if o)}"
    )


def needs_host_lengths(implementation: str) -> bool:
    """Whether the implementation of that name reads ``packed.lengths``."""
    return _load(implementation).host_lengths


def candidates(device: torch.device, implementation: str | Sequence[str]) -> tuple[str, ...]:
    """The names that may be asked; of "auto", the order follows from the request too (:mod:`.order`)."""
    if implementation == "auto":
        return CUDA if device.type == "cuda" else CPU
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise UnsupportedError(f"no attention implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    return names


def _asked(request: AttentionRequest, implementation: str | Sequence[str]) -> tuple[str, ...]:
    return order(request, _load) if implementation == "auto" else candidates(request.device, implementation)


def _load(name: str) -> Implementation:
    module, _, attribute = IMPLEMENTATIONS[name].partition(":")
    _import(module)
    found: Implementation = getattr(sys.modules[module], attribute)
    return found


@torch.compiler.assume_constant_result  # torch.compile runs it while tracing, or the first call would break the graph
def _import(module: str) -> None:
    import_module(module)


@cache
def _log_choice(device: str, name: str, reasons: tuple[tuple[str, str], ...]) -> None:
    passed = "".join(f"; not {other}: {reason}" for other, reason in reasons)
    logger.info("packed attention on %s runs on %s%s", device, name, passed)


def _describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMetadata,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout: float,
    scale: float | None,
) -> AttentionRequest:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 3):
        raise LayoutError(
            f"attention takes q [T, H, D], k [T, K, D], v [T, K, Dv] without a batch dimension, got {shapes}"
        )
    tokens, heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    if k.shape != (tokens, kv_heads, head_dim) or v.shape[0] != tokens or heads % kv_heads:
        raise LayoutError(
            f"attention takes q [T, H, D], k [T, K, D], v [T, K, Dv] with H a multiple of K, got {shapes}"
        )
    if packed.tokens != tokens:
        raise LayoutError(f"the segments cover {packed.tokens:,} tokens and q holds {tokens:,}")
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise LayoutError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device == packed.device):
        raise LayoutError(
            f"q, k, v and the segments must be on one device, got {q.device}, {k.device}, {v.device}, {packed.device}"
        )
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None and per_head.shape != (heads,):
            raise LayoutError(f"{name} must be [{heads}], one per head, got {list(per_head.shape)}")
    if window is not None and window < 1:
        raise LayoutError(f"window counts visible keys, the query's own included, so it is at least 1, got {window}")
    if softcap is not None and softcap <= 0:
        raise LayoutError(f"softcap must be positive (None for none), got {softcap}")
    if not 0 <= dropout < 1:
        raise LayoutError(f"dropout is a probability below 1, got {dropout}")
    tensors = [x for x in (q, k, v, sinks, alibi_slopes) if x is not None]
    return AttentionRequest(
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=q.dtype,
        device=q.device,
        segments=packed.cu_seqlens.shape[0] - 1,
        max_seqlen=packed.max_seqlen,
        host_lengths=packed.lengths is not None,
        requires_grad=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
        dropout=dropout,
        scale=head_dim**-0.5 if scale is None else float(scale),
        compiling=torch.compiler.is_compiling(),
    )
