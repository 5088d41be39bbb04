"""Cross-entropy of a linear layer's logits that never holds all logits: a chunk of rows at a time, loss and gradients.

hidden [N, D], the output layer's weight [V, D], targets [N] -> chunks of logits, each turned into its own gradient in
place and multiplied back -> (loss sum, weight sum). The gradients are made in the forward, because a chunk's logits are
there then and nothing but their factor is still unknown: three matrix products in all, as without chunks. The logits of
a row of 16,384 tokens and 152,000 entries are 4.6 GiB in bfloat16 and more than twice that in a plain backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.batch import IGNORE_INDEX
from packing_core.errors import LayoutError
from torch_backend.operators import operator, runs_triton

_CHUNK_BYTES = 2**29
# Of the kernel: columns that a program reads at once, and its warps; measured on an H200 (benchmarks/RESULTS.md).
_BLOCK, _WARPS = 8192, 16


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of ``hidden @ weight.T + bias`` and the summed weight of the targets.

    Args:
        hidden: [..., D].
        weight: [V, D] of the output layer, dtype of hidden.
        targets: [...] integers below V, aligned with hidden (:func:`torch_backend.loss.next_token_targets`).
        bias: [V].
        weights: [...] weight of each target; 1 if None. They get no gradient.
        ignore_index: targets that do not count.
        scale: the logits are multiplied by it (Cohere; Granite divides by ``logits_scaling``).
        softcap: the scaled logits become ``softcap * tanh(logits / softcap)`` (Gemma-2).
        chunk_bytes: about as much memory as the logits of a chunk may take.

    Returns:
        Two float32 scalars (float64 for float64), to be divided once per step (:func:`torch_backend.loss.normalise`).

    Raises:
        LayoutError: shapes or dtypes contradict each other.
    """
    given = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise LayoutError(f"linear_cross_entropy takes hidden [..., D], weight [V, D] and targets [...], got {given}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LayoutError(f"bias must be [{weight.shape[0]}], one per logit, got {list(bias.shape)}")
    if weights is not None and weights.shape != targets.shape:
        raise LayoutError(f"weights must have the shape of the targets, {list(targets.shape)}: {list(weights.shape)}")
    if weight.dtype != hidden.dtype:
        raise LayoutError(f"hidden and weight must share a dtype, got {hidden.dtype} and {weight.dtype}")
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    counted = (targets != ignore_index).to(torch.promote_types(hidden.dtype, torch.float32))
    if weights is not None:
        weights = weights.detach().flatten()
        counted = counted * weights
    rows = max(1, chunk_bytes // (weight.shape[0] * hidden.element_size()))
    rows = rows // 128 * 128 or rows
    options = ignore_index, scale, softcap or 0.0, rows
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, weights, options), counted.sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        options: tuple[int, float, float, int],
    ) -> Tensor:
        wanted = list(ctx.needs_input_grad[:3])
        loss, *gradients = _linear_cross_entropy(hidden, weight, bias, targets, weights, *options, wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(_times(x, dloss, ctx.dtype) if wants else None for x, wants in wanted), None, None, None


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` rounded once to ``dtype``, without a wider copy of a gradient that is wide already."""
    x = x.to(factor.dtype)
    if torch.compiler.is_compiling():
        return (x * factor).to(dtype)
    return torch.mul(x, factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def _launch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    ignore_index: int,
    scale: float,
    softcap: float,
    rows: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of hidden, weight and bias, each empty where it is not wanted.

    Those of weight and bias are sums over chunks and stay in float32 (at least) until they get their factor.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    losses = hidden.new_empty(hidden.shape[0], dtype=exact)
    dhidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    dweight = weight.new_zeros(weight.shape if wanted[1] else 0, dtype=exact)
    dbias = weight.new_zeros(weight.shape[:1] if wanted[2] else 0, dtype=exact)
    per_row = losses if weights is None else weights
    chunks = zip(*(x.split(rows) for x in (hidden, targets, per_row, losses)), strict=True)
    for i, (chunk, chunk_targets, chunk_weights, chunk_losses) in enumerate(chunks):
        logits = torch.nn.functional.linear(chunk, weight, bias)
        _softmax_loss(
            logits, chunk_targets, None if weights is None else chunk_weights, chunk_losses,
            ignore_index, scale, softcap, any(wanted),
        )  # fmt: skip
        if wanted[0]:
            torch.mm(logits, weight, out=dhidden[i * rows : i * rows + len(chunk)])
        if wanted[1]:
            _accumulate(dweight, logits.t(), chunk)
        if wanted[2]:
            dbias += logits.sum(0, dtype=exact)
    return losses.sum(), dhidden, dweight, dbias


def _softmax_loss(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    losses: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    gradient: bool,
) -> None:
    """Write each row's weighted loss, and with ``gradient`` turn the logits into its gradient."""
    if runs_triton(logits):
        from torch_backend import cross_entropy_kernels as kernels

        block = min(_BLOCK, 1 << (logits.shape[1] - 1).bit_length())
        kernels.softmax_loss[logits.shape[0],](
            logits, targets, weights, losses, logits.shape[1], logits.stride(0), ignore_index, scale, softcap,
            weights is not None, softcap > 0, gradient, block, num_warps=min(_WARPS, max(1, block // 32)),
        )  # fmt: skip
        return
    x = logits.to(losses.dtype) * scale
    slope: Tensor | float = scale
    if softcap:
        tanh = torch.tanh(x / softcap)
        x, slope = softcap * tanh, scale * (1 - tanh.square())
    counted = (targets != ignore_index).to(x.dtype)
    if weights is not None:
        counted = counted * weights
    place = torch.where(targets == ignore_index, 0, targets)[:, None]
    log_p = x.log_softmax(1)
    losses.copy_(-log_p.gather(1, place).squeeze(1) * counted)
    if gradient:
        dx = log_p.exp().scatter_add_(1, place, -torch.ones_like(place, dtype=x.dtype))
        logits.copy_(dx * slope * counted[:, None])


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to a total that is wider than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    ignore_index: int,
    scale: float,
    softcap: float,
    rows: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    dhidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    dweight = loss.new_empty(weight.shape if wanted[1] else 0)
    return loss, dhidden, dweight, loss.new_empty(weight.shape[:1] if wanted[2] else 0)


_linear_cross_entropy = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? weights, "
    "int ignore_index, float scale, float softcap, int rows, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch,
    _fake,
)
