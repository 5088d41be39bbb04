"""The gated delta rule over packed rows, and linear attention with a decay, whose state restarts at every segment.

q, k, v, g, beta [T, ...] and the batch's metadata -> :func:`gated_delta_rule` -> [T, H, V], forward and backward by the
operators of :mod:`.operators`; without corrections by those of :mod:`torch_backend.ops.scan.linear_attention.wide`, or
of :mod:`torch_backend.ops.scan.linear_attention.any_width` for what they do not take. Nothing is read back from the
device and shapes depend on T and the number of segments alone, so it runs in compiled layers and CUDA graphs.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.forests import by_levels
from torch_backend.ops.scan.chunks import chunk_length, scan, scan_with_states, unsupported
from torch_backend.ops.scan.gated_delta import operators as delta
from torch_backend.ops.scan.linear_attention import any_width as decay
from torch_backend.ops.scan.linear_attention import wide as linear
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
        packed: the segments; they cover all T tokens. One that continues another starts from the state of that.
        scale: of the output; K ** -0.5 by default.
        corrects: whether what the state holds for k is taken off v first.
        skip: [H], how much of v is added to the output as it is: D of Mamba-2. None for nothing.

    Returns:
        [T, H, V], dtype of v, contiguous. Gradients flow to q, k, v, g, beta and skip.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors, or their heads are of other widths.
    """
    check(q, k, v, g, beta, packed)
    if skip is not None and skip.shape != v.shape[1:2]:
        raise LayoutError(f"skip must be {list(v.shape[1:2])}, a number for each head of v, got {list(skip.shape)}")
    linearly = beta is None or not corrects
    if packed.parents is not None:
        with_states = partial(gated_delta_rule_with_states, scale=scale, corrects=corrects)
        out = by_levels(packed, with_states, q, k, v, g, beta)
        return out if skip is None else out + (skip[:, None] * v).to(out.dtype)
    if linearly and linear.serves(q, v):
        return linear.linear_attention(q, k, v, g, beta, skip, packed, scale)
    out = scan(decay.decayed_scan if linearly else delta.delta_scan, (q, k, v, g, beta), packed, scale)
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
    check(q, k, v, g, beta, packed)
    inputs = q, k, v, g, beta
    if corrects and beta is not None:
        return scan_with_states(delta.delta_scan, inputs, packed, initial, scale, delta.chunk_length(q, v))
    return scan_with_states(decay.decayed_scan, inputs, packed, initial, scale, chunk_length(q.shape[2], v))


def check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, packed: PackedMetadata) -> None:
    """Raises LayoutError or UnsupportedError for what the scans do not take."""
    if q.ndim != 3 or v.ndim != 3 or k.shape != q.shape or q.shape[0] != v.shape[0] or v.shape[1] % q.shape[1]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise LayoutError(f"gated_delta_rule takes q, k [T, Q, K] and v [T, H, V] with H a multiple of Q, got {shapes}")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None and x.shape != v.shape[:2]:
            raise LayoutError(f"{name} must be {list(v.shape[:2])} as v's first axes, got {list(x.shape)}")
    packed.check_covers("q", q.shape[0])
    reason = unsupported(v, q.shape[-1], v.shape[-1])
    if reason is not None:
        raise UnsupportedError(f"the gated delta rule {reason}")
