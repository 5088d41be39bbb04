"""The operators of the gated delta rule that :mod:`.delta_rule` calls, forward and backward, on its Triton kernels.

The backward keeps the inputs, the sums of the gates, the inverses of each chunk and the corrected values, and computes
the states again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.ops.operators import operator
from torch_backend.ops.scan.chunks import CORRECTED_TILES, Row, corrected_chunk, differentiable, like


def _row(q: Tensor, v: Tensor, beta: Tensor, initial: Tensor | None, boundaries: Tensor) -> Row:
    return Row(q, v, beta, initial, boundaries, CORRECTED_TILES, chunk=corrected_chunk(q.shape[2], v))


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan import corrected_kernels as kernels

    row = _row(q, v, beta, initial, boundaries)
    out, gates, inverses, new, final = _made(q, v, initial)
    c, strength = gates
    row.launch(kernels.prepare, k, v, g, beta, segments, c, strength, inverses, new, row.tokens)
    states = row.states(v)
    row.launch(kernels.carry, k, v, c, strength, inverses, boundaries, initial, new, states, final, row.tokens, KNOWN=False)
    row.launch(kernels.output, q, k, c, segments, new, states, out, scale, row.tokens)
    return out, gates, inverses, new, final


def _made(q: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, ...]:
    """The output; c and beta [2, H, T] in float32; T [T, H, C]; N [T, H, V]; the final states. All unwritten."""
    gates = v.new_empty(2, *v.shape[1::-1], dtype=torch.float32)
    inverses = v.new_empty(*v.shape[:2], corrected_chunk(q.shape[2], v))
    new = torch.empty_like(v) if initial is None else torch.zeros_like(v)  # chunks of padding read theirs
    return torch.empty_like(v), gates, inverses, new, like(initial, v)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, inverses: Tensor, new: Tensor,
    dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan import corrected_backward_kernels as backward
    from torch_backend.ops.scan import corrected_kernels as forward

    row = _row(q, v, beta, initial, boundaries)
    c, strength = gates
    states, dstates = row.states(v), row.states(v)
    dinitial = like(initial, v)
    # Here the final states are not needed: their memory is that of the initial ones' gradients, written later.
    row.launch(
        forward.carry, k, v, c, strength, inverses, boundaries, initial, new, states, dinitial, row.tokens,
        tile="known", KNOWN=True,
    )  # fmt: skip
    # Where several programs share a head of k, each leaves its sum in float32.
    groups = row.heads // row.group
    parts = q.dtype if groups == row.shared else torch.float32
    dq, dk = (q.new_empty(row.tokens, groups, row.width, dtype=parts) for _ in range(2))
    dscores, da = (q.new_empty(row.tokens, groups, inverses.shape[2]) for _ in range(2))
    dc, dstrength = (c.new_empty(1 + row.parts, *c.shape) for _ in range(2))
    dright, dv, dg, dbeta = torch.empty_like(v), torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    row.launch(
        backward.scores_backward, q, k, c, inverses, segments, new, dout, dright, dscores, dc, scale, row.tokens
    )
    row.launch(backward.query_backward, q, k, c, segments, states, dout, dscores, dq, dc, scale, row.tokens)
    row.launch(
        backward.carry_backward, q, k, c, strength, inverses, boundaries, dout, dright, dfinal, dstates, dinitial,
        scale, row.tokens,
    )  # fmt: skip
    row.launch(backward.solve_backward, k, v, c, strength, segments, new, dright, da, dv, dc, dstrength, row.tokens)
    row.launch(
        backward.key_backward, q, k, c, strength, segments, new, states, dstates, dright, dscores, da, dk, dc, dstrength,
        row.tokens,
    )  # fmt: skip
    row.launch(backward.gates_backward, segments, dc, dstrength, dg, dbeta, row.tokens)
    if groups != row.shared:
        dq, dk = (x.unflatten(1, (row.shared, -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dinitial


_forward = operator(
    "corrected_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor boundaries, "
    "Tensor segments, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, g, beta, initial, *_: _made(q, v, initial),
)
_backward = operator(
    "corrected_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, "
    "Tensor boundaries, Tensor segments, Tensor gates, Tensor inverses, Tensor new, Tensor dout, Tensor dfinal, "
    "float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, initial, *_: tuple(like(x, v) for x in (q, k, v, g, beta, initial)),
)
apply = differentiable(_forward, _backward)
