"""Divergence of one linear layer's softmax from another's, without the logits of either: a chunk of them at a time.

hidden states [N, D] and weight [V, D] of a student, [N, E] and [V, E] of a teacher -> chunks of rows of both logits ->
the divergence of each row. As in :mod:`torch_backend.ops.linear_logprobs`, each row's gradient has a factor of its own,
so the forward keeps three numbers for each row, and the backward makes the logits again by chunks of columns. The
teacher gets no gradient. It may have another width, dtype and device: its logits come to the student, chunk by chunk.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.errors import LayoutError, PackingError
from torch_backend.ops.linear_cross_entropy import accumulate
from torch_backend.ops.linear_logprobs import chunk_size, logits_of, transformed
from torch_backend.ops.operators import runs_triton

_CHUNK_BYTES = 2**29
_BLOCK, _WARPS = 4096, 16


class LinearLogits(NamedTuple):
    """Logits ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``, as the parts of which they are made.

    Attributes:
        hidden, weight, bias: [N, D], [V, D] of its dtype, and [V] or None.
        scale, softcap: as in :func:`torch_backend.ops.linear_logprobs.linear_logprobs`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """A part of the logits before scale and softcap, float32 at least."""
        return logits_of(self.hidden[rows], self.weight[columns], None if self.bias is None else self.bias[columns])


def linear_divergence(
    student: LinearLogits, teacher: LinearLogits, *, beta: float = 0.0, chunk_bytes: int = _CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """Divergence of the student's distributions over the whole vocabulary from the teacher's, and their entropy.

    With p of the student, q of the teacher and ``m = (1 - beta) p + beta q``, the generalised Jensen-Shannon divergence
    is ``beta KL(q || m) + (1 - beta) KL(p || m)`` (Agarwal et al. 2023, arXiv:2306.13649).

    Args:
        student, teacher: of as many rows over the same vocabulary.
        beta: 0 for the forward divergence KL(q || p), 1 for the reverse one KL(p || q), between them for that of m.
        chunk_bytes: about as much memory as the float32 logits of a chunk may take, both models together.

    Returns:
        [N] and [N], float32 (float64 for float64), on the student's device. The entropy has no gradient.

    Raises:
        LayoutError: shapes or dtypes contradict each other, or the vocabularies differ in size.
        PackingError: beta is not from 0 to 1.
    """
    for name, side in (("student", student), ("teacher", teacher)):
        hidden, weight, bias, *_ = side
        shapes = hidden.ndim == 2 and weight.ndim == 2 and weight.shape[1] == hidden.shape[1]
        if not shapes or weight.dtype != hidden.dtype or (bias is not None and bias.shape != weight.shape[:1]):
            raise LayoutError(
                f"linear_divergence takes hidden [N, D], weight [V, D] of one dtype and bias [V], got of the {name} "
                f"{hidden.dtype} {list(hidden.shape)}, {weight.dtype} {list(weight.shape)}"
            )
    check_divergence(len(student.weight), len(teacher.weight), beta)
    if len(student.hidden) != len(teacher.hidden):
        raise LayoutError(
            f"the student has {len(student.hidden):,} hidden states and the teacher {len(teacher.hidden):,}: run both "
            "on the same batch, cut over the same ranks"
        )
    teacher = teacher._replace(hidden=teacher.hidden.detach(), weight=teacher.weight.detach())
    result: tuple[Tensor, Tensor] = _LinearDivergence.apply(*student[:3], student, teacher, beta, chunk_bytes)
    return result


def check_divergence(student: int, teacher: int, beta: float) -> None:
    """
    Raises:
        LayoutError: the vocabularies differ in size.
        PackingError: beta is not from 0 to 1.
    """
    if student != teacher:
        raise LayoutError(
            f"the student has a vocabulary of {student:,} entries and the teacher one of {teacher:,}: distil from a "
            "teacher with the same tokeniser, and bring both to one size by resize_token_embeddings"
        )
    if not 0 <= beta <= 1:
        raise PackingError(f"beta must be from 0 (forward) to 1 (reverse), got {beta}")


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        student: LinearLogits,
        teacher: LinearLogits,
        beta: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        student = student._replace(hidden=hidden, weight=weight, bias=bias)
        exact = torch.promote_types(torch.promote_types(hidden.dtype, teacher.hidden.dtype), torch.float32)
        per_row = [hidden.new_empty(len(hidden), dtype=exact) for _ in range(5)]
        rows = chunk_size(chunk_bytes // 8 // len(weight))
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            x, y = (side.logits(part, slice(None)).to(hidden.device, exact) for side in (student, teacher))
            _statistics(x, y, [each[part] for each in per_row], student, teacher, beta)
            del x, y  # before the next chunk's are made
        divergence, entropy, *kept = per_row
        ctx.save_for_backward(hidden, weight, bias, *teacher[:3], *kept)
        ctx.options = student[3:], teacher[3:], beta, chunk_bytes
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ddivergence: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *others = ctx.saved_tensors
        of_student, of_teacher, beta, chunk_bytes = ctx.options
        student, teacher = LinearLogits(hidden, weight, bias, *of_student), LinearLogits(*others[:3], *of_teacher)
        exact, wanted = ddivergence.dtype, ctx.needs_input_grad
        dhidden = torch.zeros_like(hidden, dtype=exact) if wanted[0] else None
        dweight = torch.empty_like(weight) if wanted[1] else None
        dbias = torch.empty_like(bias) if bias is not None and wanted[2] else None
        columns = chunk_size(chunk_bytes // 16 // max(1, len(hidden)))
        for first in range(0, len(weight), columns):
            part = slice(first, first + columns)
            x, y = (side.logits(slice(None), part).to(hidden.device, exact) for side in (student, teacher))
            dlogits = _gradient(x, y, others[3:], ddivergence, student, teacher, beta).to(hidden.dtype)
            del x, y
            if dhidden is not None:
                accumulate(dhidden, dlogits, weight[part], anew=False)
            if dweight is not None:
                torch.mm(dlogits.t(), hidden, out=dweight[part])
            if dbias is not None:
                dbias[part] = dlogits.sum(0, dtype=exact)
            del dlogits
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias, None, None, None, None


def _statistics(
    x: Tensor, y: Tensor, out: list[Tensor], student: LinearLogits, teacher: LinearLogits, beta: float
) -> None:
    """Write [rows] each: divergence, entropy, the logs of both sums of exponentials, what the gradient subtracts."""
    if runs_triton(x):
        _launch("statistics", x, y, out, student, teacher, beta)
        return
    x, y = transformed(x, *_tail(student))[0], transformed(y, *_tail(teacher))[0]
    lses = x.logsumexp(1), y.logsumexp(1)
    log_p, log_q = x - lses[0][:, None], y - lses[1][:, None]
    log_m = _log_mixture(log_p, log_q, beta)
    of_student = (log_p.exp() * (log_p - log_m)).sum(1)
    of_teacher = (log_q.exp() * (log_q - (log_m if beta else log_p))).sum(1)
    divergence = of_teacher if beta == 0 else of_student if beta == 1 else beta * of_teacher + (1 - beta) * of_student
    for each, value in zip(out, (divergence, -(log_p.exp() * log_p).sum(1), *lses, of_student), strict=True):
        each.copy_(value)


def _gradient(
    x: Tensor,
    y: Tensor,
    kept: list[Tensor],
    ddivergence: Tensor,
    student: LinearLogits,
    teacher: LinearLogits,
    beta: float,
) -> Tensor:
    """The gradient of some columns of the student's logits, which are ``x``.

    ``p - q`` for the forward divergence, ``p (log p - log q - KL(p || q))`` for the reverse one, and
    ``(1 - beta) p (log p - log m - KL(p || m))`` between them; times the derivative of scale and softcap.
    """
    if runs_triton(x):
        out = torch.empty_like(x, dtype=student.hidden.dtype)
        _launch("gradient", x, y, [out, *kept, ddivergence.contiguous()], student, teacher, beta)
        return out
    logits, slope = transformed(x, *_tail(student))
    log_p, log_q = logits - kept[0][:, None], transformed(y, *_tail(teacher))[0] - kept[1][:, None]
    if beta == 0:
        return (log_p.exp() - log_q.exp()) * slope * ddivergence[:, None]
    weight = 1 if beta == 1 else 1 - beta
    d = weight * log_p.exp() * (log_p - _log_mixture(log_p, log_q, beta) - kept[2][:, None])
    return d * slope * ddivergence[:, None]


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Returns ``log m``, or what stands for it in the reverse divergence: ``log q``."""
    if beta in (0, 1):
        return log_q
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def _tail(side: LinearLogits) -> tuple[float, float]:
    return side.scale, side.softcap or 0.0


def _launch(
    name: str, x: Tensor, y: Tensor, others: list[Tensor], student: LinearLogits, teacher: LinearLogits, beta: float
) -> None:
    from torch_backend.ops.linear_divergence import divergence_kernels as kernels

    rows, columns = x.shape
    (scale, softcap), (of_teacher, cap_of_teacher) = _tail(student), _tail(teacher)
    block = min(_BLOCK, 1 << (columns - 1).bit_length())
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():  # where Triton starts kernels
        getattr(kernels, name)[rows,](
            x, y, *others, columns, x.stride(0), y.stride(0), scale, softcap, of_teacher, cap_of_teacher, float(beta),
            softcap > 0, cap_of_teacher > 0, 0 if beta == 0 else 1 if beta == 1 else 2, block,
            num_warps=min(_WARPS, max(1, block // 32)),
        )  # fmt: skip
