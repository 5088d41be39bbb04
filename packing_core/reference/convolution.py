"""The causal short convolution inside documents, in front of recurrent mixers: the oracle for its kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.reference.arithmetic import Array, WorkingDtype, operand, operands, plain, plain_gradients, sigmoid
from packing_core.reference.layout import Boundaries, check_shape, segment_slices


def short_convolution(
    x: npt.ArrayLike,
    weight: npt.ArrayLike,
    cu_seqlens: Boundaries,
    *,
    bias: npt.ArrayLike | None = None,
    silu: bool = False,
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """Each channel's causal convolution over its own document, zeros standing before the document's first token.

    ``y_t = f(bias + sum_w weight[W - 1 - w] x_{t-w})`` over lags ``0 <= w < W`` that stay in the document, f being silu
    or nothing (Mamba, Gu & Dao 2023, https://arxiv.org/abs/2312.00752, section 3.4). The last weight belongs to the
    current token, as in torch's Conv1d with left padding.

    Args:
        x: ``[T, E]``.
        weight: ``[E, W]``.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0.
        bias: ``[E]``; None for none.
        silu: whether the activation follows.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[T, E]`` float64, 0 for tokens of no segment.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
    """
    x, weight, bias = _checked(x, weight, bias, dtype)
    y = np.zeros_like(x)
    for document in segment_slices(cu_seqlens, x.shape[0]):
        y_ = _convolved(x[document], weight, bias)
        y[document] = y_ * sigmoid(y_) if silu else y_
    return plain(y)


def short_convolution_vjp(
    x: npt.ArrayLike,
    weight: npt.ArrayLike,
    cu_seqlens: Boundaries,
    dy: npt.ArrayLike,
    *,
    bias: npt.ArrayLike | None = None,
    silu: bool = False,
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """Gradients of ``sum(short_convolution * dy)``: the same sum with the lags the other way.

    Args:
        dy: ``[T, E]``, the gradient of the output.
        x, weight, cu_seqlens, bias, silu, dtype: as for `short_convolution`.

    Returns:
        ``{"x", "weight"}``, and ``"bias"`` when that was given, each in its input's shape.
    """
    x, weight, bias = _checked(x, weight, bias, dtype)
    (dy,) = operands(dtype, dy)
    check_shape("dy", dy, x.shape, "[T, E]")
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(x[0])
    for document in segment_slices(cu_seqlens, x.shape[0]):
        x_, dy_, dx_ = x[document], dy[document], np.zeros_like(x[document])
        if silu:
            y_ = _convolved(x_, weight, bias)
            gate = sigmoid(y_)
            dy_ = dy_ * (gate * (1.0 + y_ * (1.0 - gate)))
        for lag, column in _lags(weight, len(x_)):
            later, earlier = dy_[lag:], x_[: len(x_) - lag]
            dx_[: len(x_) - lag] = dx_[: len(x_) - lag] + weight[:, column] * later
            dweight[:, column] = dweight[:, column] + (earlier * later).sum(axis=0)
        dx[document] = dx_
        dbias = dbias + dy_.sum(axis=0)
    return plain_gradients(x=dx, weight=dweight, bias=None if bias is None else dbias)


def _convolved(x: Array, weight: Array, bias: Array | None) -> Array:
    y = np.zeros_like(x)
    for lag, column in _lags(weight, len(x)):
        y[lag:] = y[lag:] + weight[:, column] * x[: len(x) - lag]
    return y if bias is None else y + bias


def _lags(weight: Array, length: int) -> list[tuple[int, int]]:
    """Each lag that fits into a document, and the column of ``weight`` that belongs to it."""
    width = weight.shape[1]
    return [(lag, width - 1 - lag) for lag in range(min(width, length))]


def _checked(
    x: npt.ArrayLike, weight: npt.ArrayLike, bias: npt.ArrayLike | None, dtype: WorkingDtype
) -> tuple[Array, Array, Array | None]:
    (x, weight), bias = operands(dtype, x, weight), operand(dtype, bias)
    check_shape("x", x, (None, None), "[T, E]")
    check_shape("weight", weight, (x.shape[1], None), "[E, W]")
    check_shape("bias", bias, (x.shape[1],), "[E]")
    return x, weight, bias
