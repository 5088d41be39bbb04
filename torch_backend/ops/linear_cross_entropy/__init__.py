"""Cross-entropy of a linear layer's logits that never holds all logits: a chunk of rows at a time, loss and gradients.

hidden [N, D], the output layer's weight [V, D], targets [N] -> chunks of logits, each turned into its own gradient in
place and multiplied back -> (loss sum, weight sum). The gradients are made in the forward, because a chunk's logits are
there then and nothing but their factor is still unknown: three matrix products in all, as without chunks. The logits of
a row of 16,384 tokens and 152,000 entries are 4.6 GiB in bfloat16 and more than twice that in a plain backward.

Where the card is a Hopper and the dtype bfloat16, not even a chunk's logits exist: the product writes their powers over
the target's logit, which are the gradient but for one factor per row. Elsewhere a kernel turns logits into it, or plain
torch where there are no kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError
from packing_core.training.memory_model import loss_chunk
from torch_backend.ops import operators
from torch_backend.ops.operators import operator, runs_triton

# Of the kernel that reads logits: columns that a program takes at once, and its warps; of the one that makes powers:
# rows, columns, depth, warps, stages. Measured on an H200 (benchmarks/RESULTS.md).
_BLOCK, _WARPS = 16_384, 32
_TILE = (128, 256, 64, 8, 3)


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
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy of ``hidden @ weight.T + bias`` and the summed weight of the targets.

    Args:
        hidden: [..., D].
        weight: [V, D] of the output layer, dtype of hidden.
        targets: [...] integers below V, aligned with hidden (:func:`torch_backend.next_token_targets`).
        bias: [V].
        weights: [...] weight of each target; 1 if None. They get no gradient.
        ignore_index: targets that do not count.
        scale: the logits are multiplied by it (Cohere; Granite divides by ``logits_scaling``).
        softcap: the scaled logits become ``softcap * tanh(logits / softcap)`` (Gemma-2).
        chunk_bytes: about as much memory as the logits of a chunk may take; None for a seventh of all, 0.5 to 2 GiB.

    Returns:
        Two float32 scalars (float64 for float64), to be divided once per step (:func:`torch_backend.normalise`).
        A target that is no class makes the loss and its gradients NaN, unless its weight is 0.

    Raises:
        LayoutError: shapes or dtypes contradict each other.
    """
    given = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise LayoutError(f"linear_cross_entropy takes hidden [..., D], weight [V, D] and targets [...], got {given}")
    check_layer(hidden, weight, bias)
    if weights is not None and weights.shape != targets.shape:
        raise LayoutError(f"weights must have the shape of the targets, {list(targets.shape)}: {list(weights.shape)}")
    if not targets.numel():
        raise LayoutError(f"linear_cross_entropy needs at least one row, got {given}")
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    weights = None if weights is None else weights.detach().flatten()
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    labels, counted, valid = counted_targets(
        targets, weights, classes=len(weight), ignore_index=ignore_index, dtype=dtype
    )
    per_row = weight.shape[0] * hidden.element_size()
    if chunk_bytes is None:
        chunk_bytes = loss_chunk(len(hidden), per_row)
    rows = max(1, chunk_bytes // per_row)
    rows = -(-rows // 128) * 128 if rows > 128 else rows
    options = ignore_index, scale, softcap or 0.0, rows
    loss = _LinearCrossEntropy.apply(hidden, weight, bias, labels, weights, options)
    return loss * valid, counted.sum()


def counted_targets(
    targets: Tensor, weights: Tensor | None, *, classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Tells which targets count: those that are not ``ignore_index`` and have a weight other than 0.

    A kernel must not read the logit of a target that is no class.

    Returns:
        The targets, ``ignore_index`` in place of those that are no class; the weight of each, 0 for ``ignore_index``;
        and 1, or NaN if one that counts is no class.
    """
    counts = targets != ignore_index
    outside = counts & ((targets < 0) | (targets >= classes))
    counted = counts.to(dtype)
    if weights is not None:
        counted = counted * weights
    valid = torch.where((outside & (counted != 0)).any(), torch.nan, 1.0).to(dtype)
    return targets.masked_fill(outside, ignore_index), counted, valid


def check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises if an output layer's bias has another shape than its logits, or its weight another dtype than hidden."""
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LayoutError(f"bias must be [{weight.shape[0]}], one per logit, got {list(bias.shape)}")
    if weight.dtype != hidden.dtype:
        raise LayoutError(f"hidden and weight must share a dtype, got {hidden.dtype} and {weight.dtype}")


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
    """``x * factor`` rounded once to ``dtype``."""
    if torch.compiler.is_compiling() or x.ndim != 2 or not runs_triton(x):
        return (x.to(factor.dtype) * factor).to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _scale_rows(x, factor, out)
    return out


def _scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> None:
    from torch_backend.ops.linear_cross_entropy import loss_kernels as kernels

    rows, width = x.shape
    block = min(4096, 1 << (width - 1).bit_length())
    kernels.scale_rows[rows,](x, factors, out, width, min(factors.ndim, 1), block)


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
    options = _SoftmaxOptions(ignore_index, scale, softcap, any(wanted))
    losses = hidden.new_empty(hidden.shape[0], dtype=exact)
    dhidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    dweight = weight.new_empty(weight.shape if wanted[1] else 0, dtype=exact)
    dbias = weight.new_zeros(weight.shape[:1] if wanted[2] else 0, dtype=exact)
    bases = factors = None
    if _takes_powers(hidden, weight, bias):
        bases = _target_logits(hidden, weight, targets, ignore_index, scale, softcap)
        factors = torch.empty_like(bases)
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        chunk = hidden[part]
        per_row = _TargetRows(targets[part], None if weights is None else weights[part], losses[part])
        if bases is None or factors is None:
            logits = torch.nn.functional.linear(chunk, weight, bias)
            _softmax_loss(logits, per_row, options)
        else:
            logits, chunk = _powers(chunk, weight, bases[part], factors[part], per_row, options)
        if wanted[0]:
            torch.mm(logits, weight, out=dhidden[part])
        if wanted[1]:
            accumulate(dweight, logits.t(), chunk, anew=first == 0)
        if wanted[2]:
            dbias += logits.sum(0, dtype=exact)
        del logits  # before the next chunk's are made
    if wanted[0] and factors is not None:
        _scale_rows(dhidden, factors, dhidden)
    return losses.sum(), dhidden, dweight, dbias


def _takes_powers(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether the product can write powers at once: its dtype has their range, its layout can be copied."""
    if operators.INTERPRETED:
        served = hidden.dtype == torch.float32
    else:
        served = hidden.dtype == torch.bfloat16 and hidden.is_cuda
        served = served and torch.cuda.get_device_capability(hidden.device) == (9, 0)
    aligned = all(
        x.stride(-1) == 1 and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0 for x in (hidden, weight)
    )
    return operators.TRITON and served and aligned and bias is None and len(weight) * weight.itemsize % 16 == 0


def _target_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, scale: float, softcap: float
) -> Tensor:
    from torch_backend.ops.linear_cross_entropy import loss_kernels as kernels

    bases = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    kernels.target_logits[hidden.shape[0],](
        hidden, weight, targets, bases, hidden.shape[1], hidden.stride(0), weight.stride(0), ignore_index, scale,
        softcap, softcap > 0, 1024,
    )  # fmt: skip
    return bases


class _TargetRows(NamedTuple):
    """Numbers of the rows of a chunk: its targets, their weights, and the losses that are written."""

    targets: Tensor
    weights: Tensor | None
    losses: Tensor


class _SoftmaxOptions(NamedTuple):
    ignore_index: int
    scale: float
    softcap: float
    gradient: bool


def _powers(
    hidden: Tensor, weight: Tensor, bases: Tensor, factors: Tensor, per_row: _TargetRows, options: _SoftmaxOptions
) -> tuple[Tensor, Tensor]:
    """Each row's weighted loss, its gradient of the logits but for a factor per row, and ``hidden`` times that."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from torch_backend.ops.linear_cross_entropy import loss_kernels as kernels

    (rows, width), columns = hidden.shape, weight.shape[0]
    (targets, weights, losses), (ignore_index, scale, softcap, gradient) = per_row, options
    m, n, k, warps, stages = _TILE
    tiles = -(-columns // n)
    out = hidden.new_empty(rows, columns)
    divided = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    sums = losses.new_empty(rows, tiles)
    described = (
        TensorDescriptor.from_tensor(x, block) for x, block in ((hidden, [m, k]), (weight, [n, k]), (out, [m, n // 2]))
    )
    kernels.powers[min(_programs(hidden), -(-rows // m) * tiles),](
        *described, targets, bases, sums, rows, columns, scale, softcap, width, softcap > 0, gradient, m, n, k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    kernels.finish[rows,](
        hidden, weight, out, targets, weights, bases, sums, losses, factors, divided, width, hidden.stride(0),
        weight.stride(0), columns, tiles, ignore_index, scale, softcap, weights is not None, softcap > 0, gradient,
        1024, 32, 256,
    )  # fmt: skip
    return out, divided


def _programs(x: Tensor) -> int:
    """As many as run at the same time, one on each multiprocessor."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def _softmax_loss(logits: Tensor, per_row: _TargetRows, options: _SoftmaxOptions) -> None:
    """Write each row's weighted loss, and with ``gradient`` turn the logits into its gradient."""
    (targets, weights, losses), (ignore_index, scale, softcap, gradient) = per_row, options
    if runs_triton(logits):
        from torch_backend.ops.linear_cross_entropy import loss_kernels as kernels

        block = min(_BLOCK, 1 << (logits.shape[1] - 1).bit_length())
        kernels.softmax_loss[min(_programs(logits), logits.shape[0]),](
            logits, targets, weights, losses, *logits.shape, logits.stride(0), ignore_index, scale, softcap,
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


def accumulate(total: Tensor, a: Tensor, b: Tensor, *, anew: bool) -> None:
    """Add ``a @ b`` to a total that is wider than the factors, or with ``anew`` overwrite the total."""
    beta = 0 if anew else 1
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _fake(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = others[-1]
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    dhidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    dweight = loss.new_empty(weight.shape if wanted[1] else 0)
    return loss, dhidden, dweight, loss.new_empty(weight.shape[:1] if wanted[2] else 0)


_linear_cross_entropy = operator("linear_cross_entropy", _launch, _fake)
