"""Kimi delta attention over packed rows: the gated delta rule with a decay for each channel of k.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`kimi_delta_rule` -> [T, H, V], forward and backward by the
Triton kernels of :mod:`.kernels`, as :mod:`torch_backend.ops.scan.gated_delta.delta_rule` runs its own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.forests import by_levels
from torch_backend.ops.operators import operator
from torch_backend.ops.scan.chunks import (
    CHUNK,
    KIMI_TILES,
    ChunkLaunch,
    differentiable_scan,
    gradients_like,
    like,
    scan,
    scan_with_states,
    unsupported,
)
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
    if packed.parents is not None:
        return by_levels(packed, partial(kimi_delta_rule_with_states, scale=scale), q, k, v, g, beta)
    return scan(_scan, (q, k, v, g, beta), packed, scale)


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
    return scan_with_states(_scan, (q, k, v, g, beta), packed, initial, scale, CHUNK)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedMetadata) -> None:
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items())
    fits = q.ndim == 3 and k.shape == g.shape == q.shape and v.ndim == 3 and v.shape[:2] == q.shape[:2] == beta.shape
    if not fits:
        raise LayoutError(f"kimi_delta_rule takes q, k, g [T, H, K], v [T, H, V] and beta [T, H], got {shapes}")
    packed.check_covers("q", q.shape[0])
    reason = unsupported(v, q.shape[-1], v.shape[-1])
    if reason is not None:
        raise UnsupportedError(f"Kimi's delta rule {reason}")


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.kimi_delta import kernels

    row = ChunkLaunch(q, v, beta, initial, boundaries, KIMI_TILES, CHUNK)
    out, final, inverses, scores = _made(v, initial)
    strength, c, entering, asking, leaving = decayed = _decayed(q)
    row.launch(kernels.decay, q, k, g, beta, segments, *decayed, row.tokens)
    system = torch.empty_like(inverses, dtype=torch.float32)
    row.launch(kernels.score, q, k, c, segments, strength, system, scores, row.tokens)
    row.launch(kernels.solve, system, inverses, row.tokens)
    states = row.states(v)
    row.launch(
        kernels.carry, v, c, strength, entering, leaving, inverses, boundaries, initial, states, final, row.tokens
    )
    row.launch(
        kernels.output, v, strength, entering, asking, inverses, scores, states, segments, out, scale, row.tokens
    )
    return out, final, inverses, scores


def _made(v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the final states, T and B [T, H, C]. All unwritten."""
    inverses, scores = (v.new_empty(*v.shape[:2], CHUNK) for _ in range(2))
    return torch.empty_like(v), like(initial, v), inverses, scores


def _decayed(q: Tensor) -> tuple[Tensor, ...]:
    """Strength [H, T] and c in float32; entering, asking and leaving; [T, H, K] all but the first. All unwritten."""
    strength = q.new_empty(*q.shape[1::-1], dtype=torch.float32)
    return strength, torch.empty_like(q, dtype=torch.float32), *(torch.empty_like(q) for _ in range(3))


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, inverses: Tensor, scores: Tensor,
    dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.kimi_delta import backward_kernels as backward
    from torch_backend.ops.scan.kimi_delta import kernels as forward

    row = ChunkLaunch(q, v, beta, initial, boundaries, KIMI_TILES, CHUNK)
    strength, c, entering, _, leaving = decayed = _decayed(q)
    row.launch(forward.decay, q, k, g, beta, segments, *decayed, row.tokens)
    states, dstates, dnew = row.states(v), row.states(v), torch.empty_like(v)
    dq, dk, dv, dg, dbeta, dinitial = (like(x, v) for x in (q, k, v, g, beta, initial))
    # Here the final states are not needed: their memory is that of the initial ones' gradients, written later.
    row.launch(
        forward.carry, v, c, strength, entering, leaving, inverses, boundaries, initial, states, dinitial, row.tokens
    )
    row.launch(backward.values_backward, scores, segments, dout, dnew, scale, row.tokens)
    row.launch(
        backward.carry_backward, *decayed, inverses, boundaries, dout, dnew, dfinal, dstates, dinitial,
        scale, row.tokens,
    )  # fmt: skip
    row.launch(
        backward.chunk_backward, q, k, v, c, strength, entering, inverses, segments, states, dstates,
        dout, dnew, dq, dk, dv, dg, dbeta, scale, row.tokens,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dinitial


_forward = operator("kimi_delta_rule", _launch_forward, lambda q, k, v, g, beta, initial, *_: _made(v, initial))
_backward = operator("kimi_delta_rule_backward", _launch_backward, gradients_like)
_scan = differentiable_scan(_forward, _backward)
