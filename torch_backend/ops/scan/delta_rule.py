"""The gated delta rule over packed rows, and linear attention with a decay, whose state restarts at every segment.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`gated_delta_rule` -> [T, H, V], forward and backward by
the Triton kernels of :mod:`.delta_kernels`. Nothing is read back from the device and shapes depend on T and the number
of segments alone, so it runs in compiled layers and CUDA graphs. The backward keeps the inputs, the sums of the gates
and the inverses of each chunk, and computes the states again. What corrects nothing runs on :mod:`.linear`, where that
serves its heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.operators import operator
from torch_backend.ops.scan import linear
from torch_backend.ops.scan.chunks import CHUNK, Row, differentiable, like, scan, scan_with_states, unsupported
from torch_backend.segments import PackedMetadata


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    packed: PackedMetadata,
    *,
    scale: float | None = None,
    corrects: bool = True,
    skip: Tensor | None = None,
) -> Tensor:
    """Linear attention that corrects its memory: a state [K, V] per head, zero before each segment's first token.

    ``S' = exp(g_t) S``, ``S = S' + beta_t k_t (v_t - S'^T k_t)^T``, ``o_t = scale S^T q_t``: Yang et al. 2024,
    https://arxiv.org/abs/2412.06464, equation 10. Where nothing is corrected, ``S = S' + beta_t k_t v_t^T``: the scan
    of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 5) by q = C, k = B, v = x, g = dt A and
    beta = dt.

    Args:
        q, k: [T, Q, K], already normalised where the model does so; K in ``chunks.WIDTHS``.
        v: [T, H, V], H a multiple of Q; head h of v reads head h // (H / Q) of q and k.
        g: [T, H], the log of the decay, at most 0.
        beta: [T, H], the strength with which v is written, or None for 1, and then nothing is corrected.
        packed: the segments; they cover all T tokens.
        scale: of the output; K ** -0.5 by default.
        corrects: whether what the state holds for k is taken off v first.
        skip: [H], how much of v is added to the output as it is: D of Mamba-2. None for nothing.

    Returns:
        [T, H, V], dtype of v, contiguous. Gradients flow to q, k, v, g, beta and skip.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors, or their heads are of other widths.
    """
    _check(q, k, v, g, beta, packed)
    if skip is not None and skip.shape != v.shape[1:2]:
        raise LayoutError(f"skip must be {list(v.shape[1:2])}, a number for each head of v, got {list(skip.shape)}")
    if (beta is None or not corrects) and linear.serves(q, v):
        return linear.linear_attention(q, k, v, g, beta, skip, packed, scale)
    out = scan(_scan, (q, k, v, g, beta), packed, scale, corrects)
    return out if skip is None else out + (skip[:, None] * v).to(out.dtype)


def gated_delta_rule_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    packed: PackedMetadata,
    *,
    initial: Tensor | None = None,
    scale: float | None = None,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`gated_delta_rule` that continues from a state per segment and returns the last ones.

    What continues a document in another row, or several documents after a common beginning, scans like this. Segments
    are padded to whole chunks for it, so it is slower than the scan without states where they are short.

    Args:
        q, k, v, g, beta, packed, scale, corrects: as there.
        initial: [N, H, K, V], the state before the first token of each of the N segments of ``packed.cu_seqlens``; of a
            segment without tokens too. None for zeros.

    Returns:
        [T, H, V] and the states [N, H, K, V] in float32 after each segment's last token. Gradients flow to and from
        both.

    Raises:
        LayoutError, UnsupportedError: as there.
    """
    _check(q, k, v, g, beta, packed)
    delta = corrects and beta is not None
    return scan_with_states(_scan, (q, k, v, g, beta), packed, initial, scale, delta, corrects)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, packed: PackedMetadata) -> None:
    if q.ndim != 3 or v.ndim != 3 or k.shape != q.shape or q.shape[0] != v.shape[0] or v.shape[1] % q.shape[1]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise LayoutError(f"gated_delta_rule takes q, k [T, Q, K] and v [T, H, V] with H a multiple of Q, got {shapes}")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None and x.shape != v.shape[:2]:
            raise LayoutError(f"{name} must be {list(v.shape[:2])} as v's first axes, got {list(x.shape)}")
    if packed.tokens != q.shape[0]:
        raise LayoutError(f"the segments cover {packed.tokens:,} tokens and q holds {q.shape[0]:,}")
    reason = unsupported(v, q.shape[-1], v.shape[-1])
    if reason is not None:
        raise UnsupportedError(f"the gated delta rule {reason}")


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float, corrects: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan import delta_kernels as kernels

    row = Row(q, v, beta, initial, boundaries, corrects=corrects)
    out, gates, inverses, final = _made(v, beta, initial, corrects)
    c, strength = gates[0], gates[-1]
    row.launch(kernels.prepare, k, g, beta, segments, c, strength, inverses, row.tokens)
    states = row.states(v)
    row.launch(kernels.carry, k, v, c, strength, inverses, boundaries, initial, states, final, row.tokens)
    row.launch(kernels.output, q, k, v, c, strength, inverses, states, segments, out, scale, row.tokens)
    return out, gates, inverses, final


def _made(
    v: Tensor, beta: Tensor | None, initial: Tensor | None, corrects: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output; c and beta [2, H, T] in float32, or c alone; T [T, H, C]; the final states. All unwritten."""
    strong = beta is not None
    gates = v.new_empty(1 + strong, *v.shape[1::-1], dtype=torch.float32)
    inverses = v.new_empty(v.shape[0] if strong and corrects else 0, v.shape[1], CHUNK)
    return torch.empty_like(v), gates, inverses, like(initial, v)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, inverses: Tensor,
    dout: Tensor, dfinal: Tensor, scale: float, corrects: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan import delta_backward_kernels as backward
    from torch_backend.ops.scan import delta_kernels as forward

    row = Row(q, v, beta, initial, boundaries, corrects=corrects)
    c, strength = gates[0], gates[-1]
    states, dstates, dnew = row.states(v), row.states(v), torch.empty_like(v)
    dinitial = like(initial, v)
    # Here the final states are not needed: their memory is that of the initial ones' gradients, written later.
    row.launch(forward.carry, k, v, c, strength, inverses, boundaries, initial, states, dinitial, row.tokens)
    row.launch(backward.values_backward, q, k, c, segments, dout, dnew, scale, row.tokens)
    row.launch(
        backward.carry_backward, q, k, c, strength, inverses, boundaries, dout, dnew, dfinal, dstates, dinitial,
        scale, row.tokens,
    )  # fmt: skip
    # Where several programs share a head of k, each leaves its sum in float32.
    groups = row.heads // row.group
    parts = q.dtype if groups == row.shared else torch.float32
    dq, dk = (q.new_empty(row.tokens, groups, row.width, dtype=parts) for _ in range(2))
    dv, dg = dnew if beta is None else torch.empty_like(v), torch.empty_like(g)
    dbeta = like(beta, v)
    row.launch(
        backward.chunk_backward, q, k, v, c, strength, inverses, segments, states, dstates, dout, dnew,
        dq, dk, dv, dg, dbeta, scale, row.tokens,
    )  # fmt: skip
    if groups != row.shared:
        dq, dk = (x.unflatten(1, (row.shared, -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dinitial


_forward = operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, Tensor boundaries, "
    "Tensor segments, float scale, bool corrects) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, g, beta, initial, boundaries, segments, scale, corrects: _made(v, beta, initial, corrects),
)
_backward = operator(
    "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, "
    "Tensor boundaries, Tensor segments, Tensor gates, Tensor inverses, Tensor dout, Tensor dfinal, float scale, "
    "bool corrects) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, initial, *_: tuple(like(x, v) for x in (q, k, v, g, beta, initial)),
)
_scan = differentiable(_forward, _backward)
