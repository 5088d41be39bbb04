"""Kimi delta attention over packed rows: the gated delta rule with a decay for each channel of k.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`kimi_delta_rule` -> [T, H, V], forward and backward by the
Triton kernels of :mod:`.channel_kernels`, as :mod:`.delta_rule` runs its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.operators import operator
from torch_backend.ops.scan.chunks import CHUNK, KIMI_TILES, Row, like, unsupported, with_states
from torch_backend.segments import PackedMetadata


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedMetadata, *, scale: float | None = None
) -> Tensor:
    """Linear attention that corrects its memory, whose channels fade by themselves; zero before each segment.

    ``S' = diag(exp(g_t)) S``, ``S = S' + beta_t k_t (v_t - S'^T k_t)^T``, ``o_t = scale S^T q_t``: Kimi Team 2025,
    https://arxiv.org/abs/2510.26692, equation 1.

    Args:
        q, k: [T, H, K], already normalised where the model does so; K in ``chunks.WIDTHS``.
        v: [T, H, V].
        g: [T, H, K], the log of the decays, at most 0.
        beta: [T, H], the strength of the correction.
        packed: the segments; they cover all T tokens.
        scale: of the output; K ** -0.5 by default.

    Returns:
        [T, H, V], dtype of v, contiguous. Gradients flow to q, k, v, g and beta.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors, or their heads are of other widths.
    """
    _check(q, k, v, g, beta, packed)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _KimiDeltaRule.apply(
        q.to(v.dtype), k.to(v.dtype), v, g, beta, None, packed.cu_seqlens, packed.seq_idx, scale
    )[0]
    return out


def kimi_delta_rule_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedMetadata,
    *,
    initial: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`kimi_delta_rule` that takes states in and gives them out, as ``gated_delta_rule_with_states`` does.

    Raises:
        LayoutError, UnsupportedError: as there.
    """
    _check(q, k, v, g, beta, packed)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    padded, transposed, whole, place = with_states(packed, initial, (q.to(v.dtype), k.to(v.dtype), v, g, beta))
    out, final = _KimiDeltaRule.apply(*padded, transposed, whole.cu_seqlens, whole.seq_idx, scale)
    return out.index_select(0, place), final.transpose(2, 3)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedMetadata) -> None:
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items())
    fits = q.ndim == 3 and k.shape == g.shape == q.shape and v.ndim == 3 and v.shape[:2] == q.shape[:2] == beta.shape
    if not fits:
        raise LayoutError(f"kimi_delta_rule takes q, k, g [T, H, K], v [T, H, V] and beta [T, H], got {shapes}")
    if packed.tokens != q.shape[0]:
        raise LayoutError(f"the segments cover {packed.tokens:,} tokens and q holds {q.shape[0]:,}")
    reason = unsupported(v, q.shape[-1], v.shape[-1])
    if reason is not None:
        raise UnsupportedError(f"Kimi's delta rule {reason}")


class _KimiDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, boundaries, segments, scale = arguments
        inputs = [None if x is None else x.contiguous() for x in inputs]
        out, *kept, final = _forward(*inputs, boundaries, segments, scale)
        ctx.save_for_backward(*inputs, boundaries, segments, *kept)
        ctx.scale = scale
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        found = _backward(*given, dout.contiguous(), dfinal.contiguous(), ctx.scale)
        wanted = (None if x is None else gradient for x, gradient in zip(given, found, strict=False))
        return *wanted, None, None, None


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan import channel_kernels as kernels

    row = Row(q, v, beta, initial, boundaries, KIMI_TILES)
    out, c, strength, inverses, scores, final = _made(q, v, initial)
    row.launch(kernels.prepare, q, k, g, beta, segments, c, strength, inverses, scores, row.tokens)
    states = row.states(v)
    row.launch(kernels.carry, k, v, c, strength, inverses, boundaries, initial, states, final, row.tokens)
    row.launch(kernels.output, q, k, v, c, strength, inverses, scores, states, segments, out, scale, row.tokens)
    return out, c, strength, inverses, scores, final


def _made(q: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, ...]:
    """The output, c [T, H, K] and beta [H, T] in float32, T and B [T, H, C], the final states. All unwritten."""
    tokens, heads, _ = v.shape
    inverses, scores = (v.new_empty(tokens, heads, CHUNK) for _ in range(2))
    c, strength = q.new_empty(q.shape, dtype=torch.float32), q.new_empty(heads, tokens, dtype=torch.float32)
    return torch.empty_like(v), c, strength, inverses, scores, like(initial, v)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, c: Tensor, strength: Tensor, inverses: Tensor, scores: Tensor,
    dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan import channel_backward_kernels as backward
    from torch_backend.ops.scan import channel_kernels as forward

    row = Row(q, v, beta, initial, boundaries, KIMI_TILES)
    states, dstates, dnew = row.states(v), row.states(v), torch.empty_like(v)
    dq, dk, dv, dg, dbeta, dinitial = (like(x, v) for x in (q, k, v, g, beta, initial))
    # Here the final states are not needed: their memory is that of the initial ones' gradients, written later.
    row.launch(forward.carry, k, v, c, strength, inverses, boundaries, initial, states, dinitial, row.tokens)
    row.launch(backward.values_backward, scores, segments, dout, dnew, scale, row.tokens)
    row.launch(
        backward.carry_backward, q, k, c, strength, inverses, boundaries, dout, dnew, dfinal, dstates, dinitial,
        scale, row.tokens,
    )  # fmt: skip
    row.launch(
        backward.chunk_backward, q, k, v, c, strength, inverses, segments, states, dstates, dout, dnew,
        dq, dk, dv, dg, dbeta, scale, row.tokens,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dinitial


_forward = operator(
    "kimi_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor boundaries, "
    "Tensor segments, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, g, beta, initial, *_: _made(q, v, initial),
)
_backward = operator(
    "kimi_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, "
    "Tensor boundaries, Tensor segments, Tensor c, Tensor strength, Tensor inverses, Tensor scores, Tensor dout, "
    "Tensor dfinal, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, initial, *_: tuple(like(x, v) for x in (q, k, v, g, beta, initial)),
)
