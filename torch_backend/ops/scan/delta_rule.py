"""The gated delta rule over packed rows, and linear attention with a decay, whose state restarts at every segment.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`gated_delta_rule` -> [T, H, V], forward and backward by
the Triton kernels of :mod:`.delta_kernels`. Nothing is read back from the device and shapes depend on T and the number
of segments alone, so it runs in compiled layers and CUDA graphs. The backward keeps the inputs, the sums of the gates
and the inverses of each chunk, and computes the states again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.operators import operator, runs_triton
from torch_backend.segments import PackedMetadata

# Tokens. Half as many as others take: documents are short, a state is small beside it, and tiles of 32 rows keep Triton
# off Hopper's wgmma, by which it gets products of narrow heads wrong (3.6, seen with 16 and 32 channels on an H200).
CHUNK = 32
WIDTHS = (16, 32, 64, 128, 256)  # of heads, that tiles take


class Tile(NamedTuple):
    """How a kernel runs: the channels of v that it takes at once, its warps, and the stages of its loop's loads."""

    block_v: int
    warps: int
    stages: int = 1


# In float16 and bfloat16; float32 takes half of the channels, without stages, for its elements are twice as large.
TILES = {
    "prepare": Tile(0, 2),
    "carry": Tile(32, 2, 2),
    "output": Tile(64, 4),
    "values_backward": Tile(64, 4),
    "carry_backward": Tile(32, 2, 2),
    "chunk_backward": Tile(64, 4),
}
_GROUP = 16  # heads of v that share a head of k and whose gradients of it one program adds up, at most


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels do not serve q [..., Q, K] and v [..., H, V], None if they do."""
    if not runs_triton(v):
        return f"runs on a GPU in bfloat16, float16 and float32, not on {v.device.type} in {v.dtype}"
    for width in (q.shape[-1], v.shape[-1]):
        if width not in WIDTHS:
            return f"takes heads of {', '.join(map(str, WIDTHS))} channels, not {width}"
    return None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    packed: PackedMetadata,
    *,
    scale: float | None = None,
) -> Tensor:
    """Linear attention that corrects its memory: a state [K, V] per head, zero before each segment's first token.

    ``S' = exp(g_t) S``, ``S = S' + beta_t k_t (v_t - S'^T k_t)^T``, ``o_t = scale S^T q_t``: Yang et al. 2024,
    https://arxiv.org/abs/2412.06464, equation 10. Without ``beta`` nothing is corrected, ``S = S' + k_t v_t^T``: the
    scan of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 5) by q = C, k = B, v = dt x, g = dt A.

    Args:
        q, k: [T, Q, K], already normalised where the model does so; K in ``WIDTHS``.
        v: [T, H, V], H a multiple of Q; head h of v reads head h // (H / Q) of q and k.
        g: [T, H], the log of the decay, at most 0.
        beta: [T, H], the strength of the correction, or None.
        packed: the segments; they cover all T tokens.
        scale: of the output; K ** -0.5 by default.

    Returns:
        [T, H, V], dtype of v, contiguous. Gradients flow to q, k, v, g and beta.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors, or their heads are of other widths.
    """
    if q.ndim != 3 or v.ndim != 3 or k.shape != q.shape or q.shape[0] != v.shape[0] or v.shape[1] % q.shape[1]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise LayoutError(f"gated_delta_rule takes q, k [T, Q, K] and v [T, H, V] with H a multiple of Q, got {shapes}")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None and x.shape != v.shape[:2]:
            raise LayoutError(f"{name} must be {list(v.shape[:2])} as v's first axes, got {list(x.shape)}")
    if packed.tokens != q.shape[0]:
        raise LayoutError(f"the segments cover {packed.tokens:,} tokens and q holds {q.shape[0]:,}")
    reason = unsupported(q, v)
    if reason is not None:
        raise UnsupportedError(f"the gated delta rule {reason}")
    q, k = q.to(v.dtype), k.to(v.dtype)
    found: Tensor = _GatedDeltaRule.apply(
        q, k, v, g, beta, packed.cu_seqlens, packed.seq_idx, q.shape[-1] ** -0.5 if scale is None else scale
    )
    return found


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, *rest: Any) -> Tensor:
        boundaries, segments, scale = rest
        inputs = [None if x is None else x.contiguous() for x in (q, k, v, g, beta)]
        out, gates, inverses = _forward(*inputs, boundaries, segments, scale)
        ctx.save_for_backward(*inputs, boundaries, segments, gates, inverses)
        ctx.scale = scale
        found: Tensor = out
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *given, gates, inverses = ctx.saved_tensors
        dq, dk, dv, dg, dbeta = _backward(*given, gates, inverses, dout.contiguous(), ctx.scale)
        return dq, dk, dv, dg, None if given[4] is None else dbeta, None, None, None


class _Row:
    """One call: its sizes, and how each kernel is launched."""

    def __init__(self, q: Tensor, v: Tensor, beta: Tensor | None, boundaries: Tensor) -> None:
        self.dtype = v.dtype
        self.tokens, self.heads, self.value_width = v.shape
        self.shared, self.width = q.shape[1:]
        self.delta = beta is not None
        self.chunks = -(-self.tokens // CHUNK)
        self.segments = len(boundaries) - 1

    @property
    def group(self) -> int:
        """Heads of v in a program of ``chunk_backward``."""
        each = self.heads // self.shared
        return max(n for n in range(1, min(each, _GROUP) + 1) if each % n == 0)

    def states(self, like: Tensor) -> Tensor:
        """[chunks, H, V, K], unwritten."""
        return like.new_empty(self.chunks, self.heads, self.value_width, self.width)

    def launch(self, kernel: Any, *arguments: Any, values: bool = True, delta: bool = True, **more: int) -> None:
        """Start a kernel, over chunks or segments as its name says; ``values`` if it knows of v, ``delta`` of beta."""
        name = kernel.__name__
        wide = self.dtype == torch.float32
        block, warps, stages = TILES[name]
        block = min(block // (1 + wide), self.value_width)
        first = self.segments if name.startswith("carry") else self.chunks
        second = self.heads // self.group if name == "chunk_backward" else self.heads
        third = self.value_width // block if name in ("carry", "carry_backward", "output") else 1
        sizes: dict[str, Any] = {"H": self.heads, "Q": self.shared, "K": self.width, "C": CHUNK}
        sizes |= {"V": self.value_width, "BLOCK_V": block} if values else {}
        sizes |= {"DELTA": self.delta} if delta else {}
        kernel[first, second, third](
            *arguments, **sizes, **more, PRECISION="ieee" if wide else "tf32x3",
            num_warps=warps, num_stages=1 if wide else stages,
        )  # fmt: skip


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, boundaries: Tensor, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from torch_backend.ops.scan import delta_kernels as kernels

    row = _Row(q, v, beta, boundaries)
    gates, inverses = _kept(v, beta)
    c, strength = gates[0], gates[-1]
    row.launch(kernels.prepare, k, g, beta, segments, c, strength, inverses, row.tokens, values=False)
    states = row.states(v)
    row.launch(kernels.carry, k, v, c, strength, inverses, boundaries, states, row.tokens)
    out = torch.empty_like(v)
    row.launch(kernels.output, q, k, v, c, strength, inverses, states, segments, out, scale, row.tokens)
    return out, gates, inverses


def _kept(v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the backward takes from the forward: c and beta [2, H, T] in float32, or c alone, and T [T, H, C]."""
    delta = beta is not None
    gates = v.new_empty(1 + delta, *v.shape[1::-1], dtype=torch.float32)
    return gates, v.new_empty(v.shape[0] if delta else 0, v.shape[1], CHUNK)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, boundaries: Tensor, segments: Tensor,
    gates: Tensor, inverses: Tensor, dout: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan import delta_backward_kernels as backward
    from torch_backend.ops.scan import delta_kernels as forward

    row = _Row(q, v, beta, boundaries)
    c, strength, delta = gates[0], gates[-1], beta is not None
    states, dstates, dnew = row.states(v), row.states(v), torch.empty_like(v)
    row.launch(forward.carry, k, v, c, strength, inverses, boundaries, states, row.tokens)
    row.launch(backward.values_backward, q, k, c, segments, dout, dnew, scale, row.tokens, delta=False)
    row.launch(backward.carry_backward, q, k, c, strength, inverses, boundaries, dout, dnew, dstates, scale, row.tokens)
    # Where several programs share a head of k, each leaves its sum in float32.
    groups = row.heads // row.group
    parts = q.dtype if groups == row.shared else torch.float32
    dq, dk = (q.new_empty(row.tokens, groups, row.width, dtype=parts) for _ in range(2))
    dv, dg = torch.empty_like(v) if delta else dnew, torch.empty_like(g)
    dbeta = dg if beta is None else torch.empty_like(beta)
    row.launch(
        backward.chunk_backward, q, k, v, c, strength, inverses, segments, states, dstates, dout, dnew,
        dq, dk, dv, dg, dbeta, scale, row.tokens, GROUP=row.group,
    )  # fmt: skip
    if groups != row.shared:
        dq, dk = (x.unflatten(1, (row.shared, -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta if delta else g.new_empty(0)


_forward = operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor boundaries, Tensor segments, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, g, beta, *_: (torch.empty_like(v), *_kept(v, beta)),
)
_backward = operator(
    "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor boundaries, "
    "Tensor segments, Tensor gates, Tensor inverses, Tensor dout, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, *_: tuple(
        torch.empty_like(x) if x is not None else g.new_empty(0) for x in (q, k, v, g, beta)
    ),
)
