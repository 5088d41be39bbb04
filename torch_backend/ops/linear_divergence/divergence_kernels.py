"""The Triton kernels of chunked divergences; launched by ``torch_backend.ops.linear_divergence``.

``statistics`` reads each row of both logits twice: for the denominators of both softmaxes, and for the sums over the
vocabulary. ``gradient`` writes the gradient of the student's logits, for any columns of a row. All powers are of 2.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_tiles import LOG2E
from torch_backend.ops.linear_cross_entropy.loss_kernels import LN2, add_exponentials, scaled

FORWARD: tl.constexpr = tl.constexpr(0)
REVERSE: tl.constexpr = tl.constexpr(1)  # any other kind is the divergence from the mixture


@triton.jit
def log_mixture(log_p, log_q, beta):
    """The log of ``(1 - beta) p + beta q``, in base 2, also where both are too small for a number."""
    smaller = tl.exp2(-tl.abs(log_p - log_q))
    weights = tl.where(log_p >= log_q, 1 - beta + beta * smaller, beta + (1 - beta) * smaller)
    return tl.maximum(log_p, log_q) + tl.log2(weights)


@triton.jit
def statistics(
    student, teacher, divergences, entropies, lses, teacher_lses, subtracted, columns, stride, teacher_stride, scale,
    softcap, scale_of_teacher, cap_of_teacher, beta,
    SOFTCAP: tl.constexpr, TEACHER_CAP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[rows] each, float32, of logits [rows, columns] of both models. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    teacher += row * teacher_stride
    column = tl.arange(0, BLOCK)
    high, total = tl.full([BLOCK], -1.0e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    teacher_high, teacher_total = tl.full([BLOCK], -1.0e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        x, _ = scaled(tl.load(student + first + column, inside, other=0.0), scale, softcap, SOFTCAP)
        y, _ = scaled(
            tl.load(teacher + first + column, inside, other=0.0), scale_of_teacher, cap_of_teacher, TEACHER_CAP
        )
        high, total = add_exponentials(tl.where(inside, x, -1.0e30), high, total)
        teacher_high, teacher_total = add_exponentials(tl.where(inside, y, -1.0e30), teacher_high, teacher_total)
    peak, teacher_peak = tl.max(high, 0), tl.max(teacher_high, 0)
    lse = peak + tl.log2(tl.sum(total * tl.exp2(high - peak), 0))
    teacher_lse = teacher_peak + tl.log2(tl.sum(teacher_total * tl.exp2(teacher_high - teacher_peak), 0))

    entropy = tl.zeros([BLOCK], tl.float32)
    of_student, of_teacher = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        x, _ = scaled(tl.load(student + first + column, inside, other=0.0), scale, softcap, SOFTCAP)
        y, _ = scaled(
            tl.load(teacher + first + column, inside, other=0.0), scale_of_teacher, cap_of_teacher, TEACHER_CAP
        )
        log_p, log_q = x - lse, y - teacher_lse
        p, q = tl.where(inside, tl.exp2(log_p), 0.0), tl.where(inside, tl.exp2(log_q), 0.0)
        entropy -= p * log_p
        if KIND == FORWARD:
            of_teacher += q * (log_q - log_p)
        elif KIND == REVERSE:
            of_student += p * (log_p - log_q)
        else:
            log_m = log_mixture(log_p, log_q, beta)
            of_student += p * (log_p - log_m)
            of_teacher += q * (log_q - log_m)
    from_student, divergence = tl.sum(of_student, 0) * LN2, tl.sum(of_teacher, 0) * LN2
    if KIND == REVERSE:
        divergence = from_student
    elif KIND != FORWARD:
        divergence = beta * divergence + (1 - beta) * from_student
    tl.store(divergences + row, divergence)
    tl.store(entropies + row, tl.sum(entropy, 0) * LN2)
    tl.store(lses + row, lse * LN2)
    tl.store(teacher_lses + row, teacher_lse * LN2)
    tl.store(subtracted + row, from_student)


@triton.jit
def gradient(
    student, teacher, out, lses, teacher_lses, subtracted, factors, columns, stride, teacher_stride, scale,
    softcap, scale_of_teacher, cap_of_teacher, beta,
    SOFTCAP: tl.constexpr, TEACHER_CAP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, columns], contiguous: the gradient of the student's logits, times the factor of each row.

    Grid: (rows,). The columns may be any of a row's: what is kept of it is of the whole row.
    """
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    teacher += row * teacher_stride
    out += row * columns
    column = tl.arange(0, BLOCK)
    lse, teacher_lse = tl.load(lses + row) * LOG2E, tl.load(teacher_lses + row) * LOG2E
    kept, factor = tl.load(subtracted + row), tl.load(factors + row)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        x, slope = scaled(tl.load(student + first + column, inside, other=0.0), scale, softcap, SOFTCAP)
        y, _ = scaled(
            tl.load(teacher + first + column, inside, other=0.0), scale_of_teacher, cap_of_teacher, TEACHER_CAP
        )
        log_p, log_q = x - lse, y - teacher_lse
        p = tl.exp2(log_p)
        if KIND == FORWARD:
            d = p - tl.exp2(log_q)
        elif KIND == REVERSE:
            d = p * ((log_p - log_q) * LN2 - kept)
        else:
            d = (1 - beta) * p * ((log_p - log_mixture(log_p, log_q, beta)) * LN2 - kept)
        tl.store(out + first + column, (d * slope * factor).to(out.dtype.element_ty), inside)
