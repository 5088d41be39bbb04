"""Packed attention: ``attention(q, k, v, packed)``, [T, H, D] in and [T, H, Dv] out, rows already flattened.

The arguments are checked once and become a request (:mod:`.request`); the first implementation that serves it runs
(:mod:`.dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_backend.ops.attention.dispatch import (
    IMPLEMENTATIONS,
    TRIED_LAST,
    candidates,
    choose,
    compiles_parents,
    load,
    needs_host_lengths,
    prepare,
    rejections,
    run,
    runs_parents,
    select,
)
from torch_backend.ops.attention.request import AttentionRequest, Implementation, describe, request_of
from torch_backend.segments import PackedMetadata

__all__ = [
    "IMPLEMENTATIONS",
    "TRIED_LAST",
    "AttentionRequest",
    "Implementation",
    "attention",
    "candidates",
    "choose",
    "compiles_parents",
    "describe",
    "load",
    "needs_host_lengths",
    "prepare",
    "rejections",
    "request_of",
    "run",
    "runs_parents",
    "select",
]


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
        packed: the segments; they cover all T tokens. With ``packed.keys``, k and v hold the tokens of those segments
            instead, and the queries of a segment are the last of its tokens.
        causal: key j is visible to query i only if j <= i.
        window: visible keys per query, its own included: key j is visible iff i - j < window.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: [H] one logit per head that joins the denominator only.
        alibi_slopes: [H] non-negative slopes; the logit of query i and key j gets ``-slope * |i - j|``.
        dropout: probability of dropping an attention weight.
        scale: of the logits; ``D ** -0.5`` if None.
        implementation: "auto", a name of ``IMPLEMENTATIONS``, or several names, of which the first
            that supports the request runs.

    Returns:
        [T, H, Dv], dtype of q.

    Raises:
        LayoutError: shapes, dtypes or devices contradict each other.
        UnsupportedError: none of the wanted implementations supports the request; the message has the reason of each.
    """
    request = request_of(
        q,
        k,
        v,
        packed,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout=dropout,
        scale=scale,
    )
    name, request = choose(request, packed, implementation)
    return run(name, request, q, k, v, packed, sinks=sinks, alibi_slopes=alibi_slopes)
