"""The selective scan of Mamba and Mamba-2 with its state reset at each document: the oracle for state-space layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array, WorkingDtype, operand, operands, plain, plain_gradients, sigmoid
from packing_core.reference.layout import Boundaries, check_shape, segment_slices


def selective_scan(
    x: npt.ArrayLike,
    dt: npt.ArrayLike,
    A: npt.ArrayLike,
    B: npt.ArrayLike,
    C: npt.ArrayLike,
    cu_seqlens: Boundaries,
    *,
    D: npt.ArrayLike | None = None,
    z: npt.ArrayLike | None = None,
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """The state-space layer of Mamba (Gu & Dao 2023, https://arxiv.org/abs/2312.00752, section 3), reset per segment.

    For each channel, with a state ``h[N]`` that is 0 before the segment's first token:

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t
        y_t = (C_t . h_t + D x_t) silu(z_t)

    Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section 7) is the case in which the channels of a head
    share ``dt`` and one A for all N; its groups of heads that share B and C are the G here.

    Args:
        x: ``[T, E]``, E channels.
        dt: ``[T, E]`` step sizes, bias and softplus already applied.
        A: ``[E, N]``, negative.
        B: ``[T, N]``, or ``[T, G, N]`` where each of G groups serves E / G neighbouring channels.
        C: like B.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0.
        D: ``[E]`` weight of the skip connection; None for none.
        z: ``[T, E]`` gate; None for none.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[T, E]`` float64, 0 for tokens of no segment.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
    """
    x, dt, A, B, C, D, z = _checked(x, dt, A, B, C, D, z, dtype)
    y = np.zeros_like(x)
    for document in segment_slices(cu_seqlens, x.shape[0]):
        x_, B_, C_ = x[document], _per_channel(B[document], x), _per_channel(C[document], x)
        states = _states(np.exp(dt[document][..., None] * A), dt[document], B_, x_)
        y_ = _ungated(states, C_, D, x_)
        if z is not None:
            y_ = y_ * (z[document] * sigmoid(z[document]))
        y[document] = y_
    return plain(y)


def selective_scan_vjp(
    x: npt.ArrayLike,
    dt: npt.ArrayLike,
    A: npt.ArrayLike,
    B: npt.ArrayLike,
    C: npt.ArrayLike,
    cu_seqlens: Boundaries,
    dy: npt.ArrayLike,
    *,
    D: npt.ArrayLike | None = None,
    z: npt.ArrayLike | None = None,
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """Gradients of ``sum(selective_scan * dy)``.

    The state's gradient runs backwards from 0 after the segment's last token: without gate,
    ``dh_t = C_t dy_t + exp(dt_{t+1} A) dh_{t+1}``.

    Args:
        dy: ``[T, E]``, the gradient of the output.
        x, dt, A, B, C, cu_seqlens, D, z, dtype: as for `selective_scan`.

    Returns:
        ``{"x", "dt", "A", "B", "C"}``, and ``"D"`` and ``"z"`` when those were given, each in its input's shape.
    """
    x, dt, A, B, C, D, z = _checked(x, dt, A, B, C, D, z, dtype)
    (dy,) = operands(dtype, dy)
    check_shape("dy", dy, x.shape, "[T, E]")
    dx, ddt, dA, dB, dC = (np.zeros_like(w) for w in (x, dt, A, B, C))
    dD = None if D is None else np.zeros_like(D)
    dz = None if z is None else np.zeros_like(z)
    for document in segment_slices(cu_seqlens, x.shape[0]):
        x_, dt_, dy_ = x[document], dt[document], dy[document]
        B_, C_ = _per_channel(B[document], x), _per_channel(C[document], x)
        decay = np.exp(dt_[..., None] * A)
        states = _states(decay, dt_, B_, x_)
        before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])

        if z is not None and dz is not None:
            y_ = _ungated(states, C_, D, x_)
            gate = sigmoid(z[document])
            dz[document] = dy_ * y_ * (gate * (1.0 + z[document] * (1.0 - gate)))
            dy_ = dy_ * (z[document] * gate)
        dx_ = np.zeros_like(x_)
        if D is not None and dD is not None:
            dD += (dy_ * x_).sum(axis=0)
            dx_ = dy_ * D

        dstates = C_ * dy_[..., None]
        for t in reversed(range(len(x_) - 1)):
            dstates[t] = dstates[t] + decay[t + 1] * dstates[t + 1]
        dexponent = dstates * before * decay  # of the exponent dt * A
        dx[document] = dx_ + (dstates * B_).sum(axis=-1) * dt_
        ddt[document] = (dexponent * A).sum(axis=-1) + (dstates * B_).sum(axis=-1) * x_
        dA += (dexponent * dt_[..., None]).sum(axis=0)
        dB[document] = _per_group(dstates * (dt_ * x_)[..., None], B)
        dC[document] = _per_group(states * dy_[..., None], C)
    return plain_gradients(x=dx, dt=ddt, A=dA, B=dB, C=dC, D=dD, z=dz)


def _states(decay: Array, dt: Array, B: Array, x: Array) -> Array:
    """The states of one document after each of its tokens, ``[L, E, N]``."""
    states = (dt * x)[..., None] * B
    for t in range(1, len(states)):
        states[t] = decay[t] * states[t - 1] + states[t]
    return states


def _ungated(states: Array, C: Array, D: Array | None, x: Array) -> Array:
    """Outputs of one document before the gate, with the skip connection, ``[L, E]``."""
    y: Array = (states * C).sum(axis=-1)
    return y if D is None else y + D * x


def _per_channel(grouped: Array, x: Array) -> Array:
    """``[L, N]`` or ``[L, G, N]`` to ``[L, E or 1, N]``."""
    if grouped.ndim == 2:
        return grouped[:, None, :]
    return np.repeat(grouped, x.shape[1] // grouped.shape[1], axis=1)


def _per_group(gradient: Array, like: Array) -> Array:
    """The transpose of `_per_channel`: add up the channels that shared an entry."""
    length, channels, width = gradient.shape
    groups = 1 if like.ndim == 2 else like.shape[1]
    summed: Array = gradient.reshape(length, groups, channels // groups, width).sum(axis=2)
    return summed.reshape(length, *like.shape[1:])


def _checked(
    x: npt.ArrayLike,
    dt: npt.ArrayLike,
    A: npt.ArrayLike,
    B: npt.ArrayLike,
    C: npt.ArrayLike,
    D: npt.ArrayLike | None,
    z: npt.ArrayLike | None,
    dtype: WorkingDtype,
) -> tuple[Array, Array, Array, Array, Array, Array | None, Array | None]:
    x, dt, A, B, C = operands(dtype, x, dt, A, B, C)
    D, z = operand(dtype, D), operand(dtype, z)
    check_shape("x", x, (None, None), "[T, E]")
    tokens, channels = x.shape
    check_shape("dt", dt, (tokens, channels), "[T, E]")
    check_shape("A", A, (channels, None), "[E, N]")
    for name, grouped in (("B", B), ("C", C)):
        if grouped.ndim == 2:
            check_shape(name, grouped, (tokens, A.shape[1]), "[T, N]")
            continue
        check_shape(name, grouped, (tokens, None, A.shape[1]), "[T, G, N]")
        if grouped.shape[1] == 0 or channels % grouped.shape[1]:
            raise LayoutError(f"{name} has {grouped.shape[1]} groups, which do not divide the {channels} channels of x")
    check_shape("D", D, (channels,), "[E]")
    check_shape("z", z, (tokens, channels), "[T, E]")
    return x, dt, A, B, C, D, z
