"""The convolutions in front of an audio encoder, over one clip: the oracle for rows of clips."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.reference.arithmetic import Array, WorkingDtype, operands, plain, plain_gradients
from packing_core.reference.layout import check_shape

TAPS = 3


def clip_convolutions(
    features: npt.ArrayLike,
    frames: int,
    up: npt.ArrayLike,
    up_bias: npt.ArrayLike,
    down: npt.ArrayLike,
    *,
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """Two convolutions over three frames, the second of stride 2, as Whisper's encoder has them, without activations.

    Zeros stand before the first of the T frames and behind the last (Radford et al. 2022, arXiv 2212.04356, section
    2.2). What is computed of the padding behind a clip is cut off.

    Args:
        features: ``[T, C]``, padded.
        frames: of the clip, L of the T.
        up: ``[D, C, 3]``; up_bias: ``[D]``.
        down: ``[E, D, 3]``.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[(L + 1) // 2, E]`` float64.

    Raises:
        LayoutError: shapes contradict each other.
    """
    x, up, up_bias, down = _checked(features, up, up_bias, down, dtype)
    middle = convolved(x, up) + up_bias
    return plain(convolved(middle, down)[::2][: (frames + 1) // 2])


def clip_convolutions_vjp(
    features: npt.ArrayLike,
    frames: int,
    up: npt.ArrayLike,
    up_bias: npt.ArrayLike,
    down: npt.ArrayLike,
    dout: npt.ArrayLike,
    *,
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """Gradients of ``sum(clip_convolutions * dout)``, of the four arrays by name."""
    x, up, up_bias, down = _checked(features, up, up_bias, down, dtype)
    (cotangent,) = operands(dtype, dout)
    check_shape("dout", cotangent, ((frames + 1) // 2, down.shape[0]), "[(L + 1) // 2, E]")
    spread = np.zeros_like(convolved(convolved(x, up), down))
    spread[: 2 * len(cotangent) : 2] = cotangent
    middle = convolved(x, up) + up_bias
    dmiddle, ddown = convolved_vjp(middle, down, spread)
    dx, dup = convolved_vjp(x, up, dmiddle)
    return plain_gradients(features=dx, up=dup, up_bias=dmiddle.sum(axis=0), down=ddown)


def convolved(x: Array, weight: Array) -> Array:
    """``[T, C]`` and ``[D, C, 3]`` -> ``[T, D]``."""
    y = x @ weight[:, :, 1].T
    y[1:] = y[1:] + x[:-1] @ weight[:, :, 0].T
    y[:-1] = y[:-1] + x[1:] @ weight[:, :, 2].T
    return y


def convolved_vjp(x: Array, weight: Array, dy: Array) -> tuple[Array, Array]:
    """The gradients of x and of the weight."""
    dx = dy @ weight[:, :, 1]
    dx[:-1] = dx[:-1] + dy[1:] @ weight[:, :, 0]
    dx[1:] = dx[1:] + dy[:-1] @ weight[:, :, 2]
    taps = (dy[1:].T @ x[:-1], dy.T @ x, dy[:-1].T @ x[1:])
    dweight = np.zeros_like(weight)
    for tap, gradient in enumerate(taps):
        dweight[:, :, tap] = gradient
    return dx, dweight


def _checked(
    features: npt.ArrayLike, up: npt.ArrayLike, up_bias: npt.ArrayLike, down: npt.ArrayLike, dtype: WorkingDtype
) -> tuple[Array, Array, Array, Array]:
    x, first, bias, second = operands(dtype, features, up, up_bias, down)
    check_shape("features", x, (None, None), "[T, C]")
    check_shape("up", first, (None, x.shape[1], TAPS), "[D, C, 3]")
    check_shape("up_bias", bias, (first.shape[0],), "[D]")
    check_shape("down", second, (None, first.shape[0], TAPS), "[E, D, 3]")
    return x, first, bias, second
