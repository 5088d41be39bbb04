"""The request of an attention call, by which implementations are chosen: how it is made, and how it reads.

q, k, v, segments and options -> checked once, here -> an :class:`AttentionRequest`, which holds no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.segments import PackedMetadata


@dataclass(frozen=True)
class AttentionRequest:
    """Properties of an attention call that decide which implementations support it; holds no tensors or their values.

    Attributes:
        tokens, heads, kv_heads, head_dim, value_dim: T, H, K, D, Dv.
        dtype, device: of q, k and v.
        segments, max_seqlen: of the metadata; ``segments`` counts the zero-length ones that pad ``cu_seqlens``.
        host_lengths: whether the segment lengths are known on the host.
        requires_grad: whether a backward may follow.
        causal, window, softcap, dropout, scale: as in :func:`attention`, ``scale`` resolved.
        sinks, alibi: whether those tensors are given.
        compiling: whether torch.compile is tracing the call.
        key_tokens: S, of the keys and values, where queries are the last tokens of longer key segments; None for T.
        parents: whether segments continue others, so that queries also see their ancestors.
        both_ways: whether tokens of spans see each other both ways (``packed.spans``).
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
    scale: float
    host_lengths: bool = True
    requires_grad: bool = True
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout: float = 0.0
    compiling: bool = False
    key_tokens: int | None = None
    parents: bool = False
    both_ways: bool = False


class AttentionInputs(NamedTuple):
    """The tensors and segments of an attention call, as :func:`attention` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    packed: PackedMetadata
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


class Implementation(Protocol):
    """The interface of an entry of ``IMPLEMENTATIONS``.

    Attributes:
        host_lengths: it needs ``packed.lengths``; the collator then carries them.
        parents: it serves requests in which segments continue others; False where it has no such attribute.
        compiled_parents: it also does so in compiled layers, by what ``prepare`` derived; False likewise.
        both_ways: it serves requests in which spans see both ways; False likewise.

    One that takes queries that are the last tokens of longer key segments (``packed.keys``) has ``more_keys = True``.
    One that derives something from the segments may have ``prepare(packed, request)``, which does so ahead of layers
    that are compiled. One that serves some requests only by building score matrices may have ``last_resort(request)``,
    which says so in one clause, or None: "auto" then tries it after all others.
    """

    host_lengths: bool

    def supports(self, request: AttentionRequest) -> str | None:
        """Returns None, or a clause why it is not supported (library absent, wrong device, no such option)."""
        ...

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        """Attention of a request that :meth:`supports` accepted; shapes and dtypes were checked by the caller."""
        ...


def request_of(
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
) -> AttentionRequest:
    """The request that a call of ``attention`` with these arguments makes.

    Raises:
        LayoutError: shapes, dtypes or devices contradict each other, or an option is out of its range.
    """
    _check_tensors(q, k, v, packed, sinks=sinks, alibi_slopes=alibi_slopes)
    _check_options(packed, causal=causal, window=window, softcap=softcap, dropout=dropout)
    tokens, heads, head_dim = q.shape
    _, kv_heads, value_dim = v.shape
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
        key_tokens=None if packed.keys is None else packed.keys.tokens,
        parents=packed.parents is not None,
        both_ways=packed.spans is not None,
    )


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMetadata,
    *,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> None:
    """Raises if tensors do not agree with each other or with the segments."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 3):
        raise LayoutError(
            f"attention takes q [T, H, D], k [T, K, D], v [T, K, Dv] without a batch dimension, got {shapes}"
        )
    (tokens, heads, head_dim), kv_heads = q.shape, v.shape[1]
    keys = tokens if packed.keys is None else packed.keys.tokens
    if k.shape != (keys, kv_heads, head_dim) or v.shape[0] != keys or heads % kv_heads:
        raise LayoutError(
            f"attention takes q [T, H, D], k [T, K, D], v [T, K, Dv] with H a multiple of K, got {shapes}"
        )
    packed.check_covers("q", tokens)
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise LayoutError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device == packed.device):
        raise LayoutError(
            f"q, k, v and the segments must be on one device, got {q.device}, {k.device}, {v.device}, {packed.device}"
        )
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None and per_head.shape != (heads,):
            raise LayoutError(f"{name} must be [{heads}], one per head, got {list(per_head.shape)}")


def _check_options(
    packed: PackedMetadata, *, causal: bool, window: int | None, softcap: float | None, dropout: float
) -> None:
    """Raises if an option is out of its range, or does not go with the segments."""
    if window is not None and window < 1:
        raise LayoutError(f"window counts visible keys, the query's own included, so it is at least 1, got {window}")
    if softcap is not None and softcap <= 0:
        raise LayoutError(f"softcap must be positive (None for none), got {softcap}")
    if packed.parents is not None and not causal:
        raise LayoutError("segments that continue others need causal attention: what they continue must not see them")
    if packed.spans is not None:
        if not causal:
            raise LayoutError("spans need causal attention: without it every token sees both ways")
        if packed.keys is not None or packed.parents is not None:
            raise LayoutError(
                "spans have no place where segments continue others, nor where keys have segments of their own: "
                "leave the spans out, packed.without_spans"
            )
    if not 0 <= dropout < 1:
        raise LayoutError(f"dropout is a probability below 1, got {dropout}")


_OPTIONS = {"softcap": "softcap", "sinks": "sinks", "alibi": "ALiBi", "dropout": "dropout"}


def lacking(request: AttentionRequest, *options: str) -> str | None:
    """The reason of an implementation without these options, of which the request has one; None if it has none."""
    return next((f"no {_OPTIONS[name]}" for name in options if getattr(request, name)), None)


def describe(request: AttentionRequest) -> str:
    """The request in a few words, for error messages and ``explain``."""
    options = [
        "causal" if request.causal else "not causal",
        request.window is not None and f"window {request.window:,}",
        request.softcap is not None and f"softcap {request.softcap:g}",
        request.sinks and "sinks",
        request.alibi and "ALiBi",
        request.dropout > 0 and f"dropout {request.dropout:g}",
        request.key_tokens is not None and "queries at the end of longer key segments",
        request.parents and "shared prefixes",
        request.both_ways and "spans that see both ways",
    ]
    return (
        f"{request.heads} heads ({request.kv_heads} of keys) of {request.head_dim} ({request.value_dim} of values), "
        f"{str(request.dtype).removeprefix('torch.')} on {request.device.type}, {', '.join(o for o in options if o)}"
    )
