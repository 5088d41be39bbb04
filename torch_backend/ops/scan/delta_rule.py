"""The gated delta rule over packed rows, and linear attention with a decay, whose state restarts at every segment.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`gated_delta_rule` -> [T, H, V], forward and backward by
the Triton kernels of :mod:`.delta_kernels`. Nothing is read back from the device and shapes depend on T and the number
of segments alone, so it runs in compiled layers and CUDA graphs. The backward keeps the inputs and recomputes the rest.
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


class Tiling(NamedTuple):
    """How kernels divide V, and their warps."""

    chunk_v: int  # channels of v in a step of a kernel over chunks
    carry_v: int  # in a program that walks a document
    warps: int
    carry_warps: int


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
        ctx.save_for_backward(*inputs, boundaries, segments)
        ctx.scale = scale
        out: Tensor = _forward(*inputs, boundaries, segments, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, boundaries, segments = ctx.saved_tensors
        dq, dk, dv, dg, dbeta = _backward(*inputs, boundaries, segments, dout.contiguous(), ctx.scale)
        return dq, dk, dv, dg, None if inputs[4] is None else dbeta, None, None, None


def _tiling(dtype: torch.dtype, value_width: int) -> Tiling:
    chunk_v = 32 if dtype == torch.float32 else 64
    return Tiling(min(chunk_v, value_width), min(32, value_width), 4, 2)


class _Row:
    """One call: its sizes, and what the kernels leave for one another."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, boundaries: Tensor, segments: Tensor
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.boundaries, self.segments = boundaries, segments
        self.tokens, heads, value_width = v.shape
        self.chunks = -(-self.tokens // CHUNK)
        self.tiling = _tiling(v.dtype, value_width)
        self.sizes: dict[str, Any] = {
            "H": heads, "Q": q.shape[1], "K": q.shape[2], "V": value_width, "DELTA": beta is not None, "C": CHUNK,
            "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32x3",
        }  # fmt: skip
        self.over_chunks = {"BLOCK_V": self.tiling.chunk_v, "num_warps": self.tiling.warps, "num_stages": 1}
        self.over_segments = {"BLOCK_V": self.tiling.carry_v, "num_warps": self.tiling.carry_warps, "num_stages": 1}

    @property
    def chunk_grid(self) -> tuple[int, int]:
        return self.chunks, self.sizes["H"]

    @property
    def segment_grid(self) -> tuple[int, int, int]:
        return len(self.boundaries) - 1, self.sizes["H"], self.sizes["V"] // self.tiling.carry_v

    def per_head(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[T, H, width], unwritten."""
        return self.v.new_empty(self.tokens, self.sizes["H"], width, dtype=dtype)

    def all_states(self) -> Tensor:
        """[chunks, H, K, V], unwritten."""
        return self.v.new_empty(self.chunks, self.sizes["H"], self.sizes["K"], self.sizes["V"])

    def prepare(self, inverse: bool) -> None:
        """c, W, U and, if asked for, T, then the states."""
        from torch_backend.ops.scan import delta_kernels as kernels

        delta = self.beta is not None
        self.c = self.v.new_empty(self.v.shape[:2], dtype=torch.float32)
        self.w = self.per_head(self.sizes["K"]) if delta else self.v
        self.u = torch.empty_like(self.v) if delta else self.v
        self.inverses = self.per_head(CHUNK) if delta and inverse else self.v
        kernels.prepare[self.chunk_grid](
            self.k, self.v, self.g, self.beta, self.segments, self.c, self.w, self.u, self.inverses, self.tokens,
            INVERSE=inverse, **self.sizes, **self.over_chunks,
        )  # fmt: skip
        self.states = self.all_states()
        kernels.carry[self.segment_grid](
            self.k, self.w, self.u, self.c, self.boundaries, self.states, **self.sizes, **self.over_segments
        )


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, boundaries: Tensor, segments: Tensor, scale: float
) -> Tensor:
    from torch_backend.ops.scan import delta_kernels as kernels

    row = _Row(q, k, v, g, beta, boundaries, segments)
    row.prepare(inverse=False)
    out = torch.empty_like(v)
    kernels.output[(*row.chunk_grid, row.sizes["V"] // row.tiling.chunk_v)](
        q, k, row.w, row.u, row.c, row.states, segments, out, scale, row.tokens, **row.sizes, **row.over_chunks
    )
    return out


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, boundaries: Tensor, segments: Tensor,
    dout: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan import delta_kernels as kernels

    row = _Row(q, k, v, g, beta, boundaries, segments)
    row.prepare(inverse=True)
    delta = beta is not None
    plain = {name: value for name, value in row.sizes.items() if name != "DELTA"}
    dnew = torch.empty_like(v)
    kernels.values_backward[row.chunk_grid](
        q, k, row.c, segments, dout, dnew, scale, row.tokens, **plain, **row.over_chunks
    )
    dstates = row.all_states()
    kernels.carry_backward[row.segment_grid](
        q, k, row.w, row.c, boundaries, dout, dnew, dstates, scale, **row.sizes, **row.over_segments
    )
    # Of each head of v, in float32: heads that share a head of k add up.
    dq, dk = (row.per_head(row.sizes["K"], torch.float32) for _ in range(2))
    dw = row.per_head(row.sizes["K"]) if delta else v
    dc = torch.empty_like(row.c)
    kernels.scores_backward[row.chunk_grid](
        q, k, row.w, row.u, row.c, segments, row.states, dstates, dout, dnew, dq, dk, dw, dc, scale, row.tokens,
        **row.sizes, **row.over_chunks,
    )  # fmt: skip
    dv, dg = torch.empty_like(v) if delta else dnew, torch.empty_like(g)
    dbeta = dg if beta is None else torch.empty_like(beta)
    kernels.prepare_backward[row.chunk_grid](
        k, v, beta, row.w, row.u, row.c, row.inverses, segments, dnew, dw, dc, dk, dv, dg, dbeta, row.tokens,
        **row.sizes, **row.over_chunks,
    )  # fmt: skip
    dq, dk = (x.unflatten(1, (q.shape[1], -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta if delta else g.new_empty(0)


_forward = operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor boundaries, Tensor segments, "
    "float scale) -> Tensor",
    _launch_forward,
    lambda q, k, v, *_: torch.empty_like(v),
)
_backward = operator(
    "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor boundaries, "
    "Tensor segments, Tensor dout, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, *_: tuple(
        torch.empty_like(x) if x is not None else g.new_empty(0) for x in (q, k, v, g, beta)
    ),
)
