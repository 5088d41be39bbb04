"""Rotary position embedding: the oracle for every rotary kernel.

Channel pair p of a token at position t is turned by the angle ``t * inv_freq[p]`` (Su et al. 2021,
https://arxiv.org/abs/2104.09864, eq. 34). The two layouts in use differ in which channels make a pair:

    half          (p, p + R/2)    GPT-NeoX, Llama, everything that calls ``rotate_half``
    interleaved   (2p, 2p + 1)    the paper, GPT-J

R = 2 * len(inv_freq) channels turn and the rest pass through (partial rotary). Variants such as linear scaling, dynamic
NTK, YaRN, longrope and Llama-3 are other ``inv_freq``, and a factor ``scale`` on the turned channels for those that
have one (YaRN, Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.4).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array, WorkingDtype, operands, plain
from packing_core.reference.layout import check_shape


def rope(
    x: npt.ArrayLike,
    positions: npt.ArrayLike,
    inv_freq: npt.ArrayLike,
    *,
    interleaved: bool = False,
    scale: float = 1.0,
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """Turn the first ``2 * len(inv_freq)`` channels of each head by the angle of the token's position.

    The angle is rounded to float32 under every ``dtype`` but float64, as implementations do: an angle of some thousands
    has no fractional part left in bfloat16. Its sine and cosine are rounded to the dtype.

    Args:
        x: ``[T, H, D]``.
        positions: ``[T]``, the position of each token inside its document.
        inv_freq: ``[R/2]`` radians per position, R at most D.
        interleaved: pair neighbouring channels instead of halves.
        scale: factor on the turned channels.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[T, H, D]`` float64.

    Raises:
        LayoutError: the shapes contradict each other.
    """
    return _turn(x, positions, inv_freq, interleaved, scale, dtype, direction=1)


def rope_vjp(
    x: npt.ArrayLike,
    positions: npt.ArrayLike,
    inv_freq: npt.ArrayLike,
    dout: npt.ArrayLike,
    *,
    interleaved: bool = False,
    scale: float = 1.0,
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """The gradient of ``sum(rope(x) * dout)`` for ``x``: a rotation's transpose turns by the opposite angle.

    Args:
        dout: ``[T, H, D]``, the gradient of the output.
        x, positions, inv_freq, interleaved, scale, dtype: as for `rope`; of ``x`` only the shape matters.

    Returns:
        ``{"x"}``.
    """
    x, dout = np.asarray(x), np.asarray(dout)
    check_shape("x", x, (None, None, None), "[T, H, D]")
    check_shape("dout", dout, x.shape, "[T, H, D]")
    return {"x": _turn(dout, positions, inv_freq, interleaved, scale, dtype, direction=-1)}


def _turn(
    x: npt.ArrayLike,
    positions: npt.ArrayLike,
    inv_freq: npt.ArrayLike,
    interleaved: bool,
    scale: float,
    dtype: WorkingDtype,
    direction: int,
) -> npt.NDArray[np.float64]:
    (x,) = operands(dtype, x)
    check_shape("x", x, (None, None, None), "[T, H, D]")
    tokens, _, width = x.shape
    positions, inv_freq = operands("float64" if dtype == "float64" else "float32", positions, inv_freq)
    check_shape("positions", positions, (tokens,), "[T]")
    check_shape("inv_freq", inv_freq, (None,), "[R/2]")
    turned = 2 * inv_freq.size
    if turned > width:
        raise LayoutError(
            f"inv_freq has {inv_freq.size} entries, which turn {turned} channels, and x has {width}: pass fewer"
        )

    angle = direction * positions[:, None, None] * inv_freq  # [T, 1, R/2]
    cos, sin = operands(dtype, scale * np.cos(angle), scale * np.sin(angle))
    first, second = _pairs(x, turned, interleaved)
    out = x.copy()
    out_first, out_second = _pairs(out, turned, interleaved)
    out_first[...] = first * cos - second * sin
    out_second[...] = second * cos + first * sin
    return plain(out)


def _pairs(x: Array, turned: int, interleaved: bool) -> tuple[Array, Array]:
    """Views of the first and of the second channel of each pair, ``[T, H, R/2]``."""
    if interleaved:
        return x[..., 0:turned:2], x[..., 1:turned:2]
    return x[..., : turned // 2], x[..., turned // 2 : turned]
