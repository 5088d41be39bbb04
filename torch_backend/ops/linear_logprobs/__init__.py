"""Log-probabilities and entropy of a linear layer's logits that never holds all logits: a chunk of rows at a time.

hidden [N, D], the output layer's weight [V, D], ids [N, K] -> chunks of logits -> log-probabilities [N, K] of the ids
and the entropy [N] of each row's distribution. Each row's gradient has a factor of its own, unknown in the forward. So
nothing but the log of the softmax's denominator is kept, and the backward makes the logits again: four matrix products
in all, and one where no gradient is wanted.

The forward needs whole rows of logits, so its chunks are rows. The backward knows their denominators, so its chunks are
columns: each entry of the weight's gradient, the largest tensor, is one product over all rows, in the weight's dtype.

On a GPU, products of half precision are kept in float32: a logit of 20 has an error of 0.06 in bfloat16, which is the
size of the differences that ratios of policies are made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.errors import LayoutError
from torch_backend.ops.linear_cross_entropy import accumulate, check_layer
from torch_backend.ops.operators import operator, runs_triton

_CHUNK_BYTES = 2**29
_BLOCK, _WARPS = 8192, 16


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``ids`` under the softmax of ``hidden @ weight.T + bias``, and its entropy.

    Args:
        hidden: [N, D].
        weight: [V, D] of the output layer, dtype of hidden.
        ids: int64 [N, K], K at least 1, below V. A row whose first id is negative is left out.
        bias: [V].
        scale: the logits are multiplied by it, ``1 / temperature`` for one.
        softcap: the scaled logits become ``softcap * tanh(logits / softcap)``.
        entropy: whether it is wanted; it costs a little more.
        chunk_bytes: about as much memory as the float32 logits of a chunk may take; half as much in the backward,
            where their gradient and that of ``hidden`` in float32 lie beside them.

    Returns:
        [N, K] and [N], float32 (float64 for float64), both differentiable; 0 in rows that are left out, and an entropy
        of 0 everywhere if it is not wanted.

    Raises:
        LayoutError: shapes or dtypes contradict each other.
    """
    given = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, ids {list(ids.shape)}"
    shapes = hidden.ndim == 2 and weight.ndim == 2 and weight.shape[1] == hidden.shape[1]
    if not shapes or ids.ndim != 2 or len(ids) != len(hidden) or not ids.numel():
        raise LayoutError(f"linear_logprobs takes hidden [N, D], weight [V, D] and ids [N, K], not empty, got {given}")
    check_layer(hidden, weight, bias)
    rows = chunk_size(chunk_bytes // 4 // len(weight))
    columns = chunk_size(chunk_bytes // 8 // len(hidden))
    options = scale, softcap or 0.0, entropy
    logprobs, entropies = _LinearLogprobs.apply(hidden, weight, bias, ids, options, rows, columns)
    return logprobs, entropies


def chunk_size(size: int) -> int:
    """The size of a chunk as kernels like it, at least 1."""
    return size // 128 * 128 or max(1, size)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        options: tuple[float, float, bool],
        rows: int,
        columns: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, lse = _linear_logprobs(hidden, weight, bias, ids, *options, rows)
        ctx.save_for_backward(hidden, weight, bias, ids, lse, entropies)
        ctx.options = *options, columns
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor, dentropies: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:3])
        hidden, weight, bias, *rest = ctx.saved_tensors
        found = _linear_logprobs_backward(hidden, weight, bias, *rest, dlogprobs, dentropies, *ctx.options, wanted)
        dhidden, dweight, dbias = (x if w else None for x, w in zip(found, wanted, strict=True))
        if bias is not None and dbias is not None:
            dbias = dbias.to(bias.dtype)
        return dhidden, dweight, dbias, None, None, None, None


def _launch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    scale: float,
    softcap: float,
    entropy: bool,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities, the entropy and the log of each row's sum of exponentials."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = hidden.new_empty(ids.shape, dtype=exact)
    entropies = hidden.new_zeros(len(hidden), dtype=exact)
    lse = torch.empty_like(entropies)
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        logits = logits_of(hidden[part], weight, bias)
        _statistics(logits, lse[part], entropies[part], scale, softcap, entropy)
        at_ids, _ = transformed(logits.gather(1, ids[part].clamp(min=0)), scale, softcap)
        torch.sub(at_ids, lse[part, None], out=logprobs[part])
        del logits  # before the next chunk's are made
    left_out = ids[:, :1] < 0
    return logprobs.masked_fill_(left_out, 0), entropies.masked_fill_(left_out[:, 0], 0), lse


def _launch_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    lse: Tensor,
    entropies: Tensor,
    dlogprobs: Tensor,
    dentropies: Tensor,
    scale: float,
    softcap: float,
    entropy: bool,
    columns: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias, each empty where it is not wanted; that of bias float32 at least."""
    exact = lse.dtype
    dhidden = hidden.new_empty(hidden.shape if wanted[0] else 0, dtype=exact)
    dweight = weight.new_empty(weight.shape if wanted[1] else 0)
    dbias = weight.new_empty(weight.shape[:1] if wanted[2] else 0, dtype=exact)
    left_out = ids[:, :1] < 0
    dlogprobs, dentropies = dlogprobs.masked_fill(left_out, 0), dentropies.masked_fill(left_out[:, 0], 0)
    per_row, options = (ids.clamp(min=0), lse, entropies, dlogprobs, dentropies), (scale, softcap, entropy)
    for first in range(0, len(weight), columns):
        part = slice(first, first + columns)
        logits = logits_of(hidden, weight[part], None if bias is None else bias[part])
        dlogits = _gradient(logits, first, hidden.dtype, per_row, options)
        del logits
        if wanted[0]:
            accumulate(dhidden, dlogits, weight[part], anew=first == 0)
        if wanted[1]:
            torch.mm(dlogits.t(), hidden, out=dweight[part])
        if wanted[2]:
            torch.sum(dlogits, 0, dtype=exact, out=dbias[part])
        del dlogits
    return dhidden.to(hidden.dtype), dweight, dbias


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    exact = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.is_cuda and hidden.dtype != exact:
        logits = torch.mm(hidden, weight.t(), out_dtype=exact)
        return logits if bias is None else logits.add_(bias)
    return torch.nn.functional.linear(hidden, weight, bias).to(exact)


def transformed(logits: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Logits after scale and softcap, and the derivative of that by the logits."""
    x = logits * scale
    if not softcap:
        return x, scale
    capped = torch.tanh(x / softcap)
    return softcap * capped, scale * (1 - capped.square())


def _statistics(logits: Tensor, lse: Tensor, entropies: Tensor, scale: float, softcap: float, entropy: bool) -> None:
    """Write each row's log of the sum of exponentials and, if it is wanted, its entropy."""
    if runs_triton(logits):
        from torch_backend.ops.linear_logprobs import logprob_kernels as kernels

        rows, columns = logits.shape
        block = min(_BLOCK, 1 << (columns - 1).bit_length())
        kernels.statistics[rows,](
            logits, lse, entropies, columns, logits.stride(0), scale, softcap, softcap > 0, entropy, block,
            num_warps=min(_WARPS, max(1, block // 32)),
        )  # fmt: skip
        return
    x, _ = transformed(logits, scale, softcap)
    torch.logsumexp(x, 1, out=lse)
    if entropy:
        log_p = x - lse[:, None]
        entropies.copy_(-(log_p.exp() * log_p).sum(1))


def _gradient(
    logits: Tensor, first: int, dtype: torch.dtype, per_row: tuple[Tensor, ...], options: tuple[float, float, bool]
) -> Tensor:
    """The gradient of logits [N, C], the columns from ``first`` on, in ``dtype``.

    With ``p`` the probabilities, ``g`` and ``e`` the gradients of the log-probabilities and the entropy ``H``:
    ``sum_k g_k (1[j = id_k] - p_j) - e p_j (log p_j + H)``, times the derivative of scale and softcap. What concerns
    the ids is written over the rest and not added to it, or rounding would leave nothing of ``g (1 - p)`` near p = 1.
    """
    (ids, lse, entropies, dlogprobs, dentropies), (scale, softcap, entropy) = per_row, options
    total, (rows, columns) = dlogprobs.sum(1), logits.shape
    places = ids - first
    inside = (places >= 0) & (places < columns)
    x, slope = transformed(logits.gather(1, places.clamp(0, columns - 1)), scale, softcap)
    log_p = x - lse[:, None]
    same = (ids[:, :, None] == ids[:, None, :]).to(dlogprobs.dtype)  # an id that is there twice has both gradients
    own = (same * dlogprobs[:, None, :]).sum(2)
    at_ids = (own + _of_others(log_p, total, entropies, dentropies, entropy)) * slope
    # ids of other columns are written behind those of this chunk, in rows that begin at multiples of eight
    out = logits.new_empty(rows, (columns // 8 + 1) * 8, dtype=dtype)
    if runs_triton(logits):
        from torch_backend.ops.linear_logprobs import logprob_kernels as kernels

        block = min(_BLOCK, 1 << (columns - 1).bit_length())
        kernels.gradient[rows,](
            logits, out, lse, entropies, total, dentropies.contiguous(), columns, logits.stride(0), out.stride(0),
            scale, softcap, softcap > 0, entropy, block, num_warps=min(_WARPS, max(1, block // 32)),
        )  # fmt: skip
    else:
        x, slope = transformed(logits, scale, softcap)
        out[:, :columns] = _of_others(x - lse[:, None], total, entropies, dentropies, entropy) * slope
    return out.scatter_(1, torch.where(inside, places, columns), at_ids.to(dtype))[:, :columns]


def _of_others(log_p: Tensor, total: Tensor, entropies: Tensor, dentropies: Tensor, entropy: bool) -> Tensor:
    """The part of the gradient that every column has."""
    factor = -total[:, None]
    if entropy:
        factor = factor - dentropies[:, None] * (log_p + entropies[:, None])
    return log_p.exp() * factor


def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = hidden.new_empty(ids.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return logprobs, logprobs.new_empty(len(hidden)), logprobs.new_empty(len(hidden))


def _fake_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = others[-1]
    dhidden, dweight = (x.new_empty(x.shape if w else 0) for x, w in zip((hidden, weight), wanted, strict=False))
    return dhidden, dweight, lse.new_empty(len(weight) if wanted[2] else 0)


_linear_logprobs = operator("linear_logprobs", _launch, _fake)
_linear_logprobs_backward = operator("linear_logprobs_backward", _launch_backward, _fake_backward)
