"""The reference backend's delta rule and Mamba-2 scan: whole rows, token by token, in numpy.

Both are one recurrence, with and without the correction. A state is reset by a decay of 0. Each rule that a mutant
breaks is a method of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.draws import round_to
from conformance.scans import normalised_vjp
from packing_core.protocol import Array, Backend, Gradients, ScanCall, takes_call

Backward = Callable[[Array], tuple[Array, ...]]


class ScanMethods(Backend):
    """`delta_rule` and `ssd`."""

    @takes_call("q", "k", "v", "g", "beta")
    def delta_rule(self, call: ScanCall) -> tuple[Array, Gradients]:
        ids, dout, normalise = call.segment_ids, call.dout, call.options.get("normalise", False)
        q, k, v, g, beta = (x.astype(np.float64) for x in call.operands.values())
        given, real, heads = (q, k), (ids > 0)[..., None], v.shape[2]
        if normalise:
            q, k = self.unit(q), self.unit(k)
        serving = self.key_head(heads, k.shape[2])
        decay = self.decays(g if g.ndim == 4 else g[..., None], ids)
        scale = q.shape[3] ** -0.5
        out, backward = _recurrence(q[:, :, serving] * scale, k[:, :, serving] * real[..., None], v, decay, beta * real)
        out = out * real[..., None]
        if dout is None:
            return round_to(call.dtype, out), {}
        dq, dk, dv, ddecay, dbeta = backward(dout.astype(np.float64) * real[..., None])
        dg = ddecay * decay
        gradients = {
            "q": _summed(dq * scale, serving, q.shape[2]),
            "k": _summed(dk, serving, k.shape[2]),
            "v": dv,
            "g": dg if g.ndim == 4 else dg.sum(axis=-1),
            "beta": dbeta,
        }
        if normalise:
            gradients |= {name: normalised_vjp(x, gradients[name]) for name, x in zip("qk", given, strict=True)}
        gradients = {name: x * real.reshape(real.shape + (1,) * (x.ndim - 3)) for name, x in gradients.items()}
        return round_to(call.dtype, out), {name: round_to(call.dtype, x) for name, x in gradients.items()}

    @takes_call("x", "dt", "A", "B", "C", "D")
    def ssd(self, call: ScanCall) -> tuple[Array, Gradients]:
        ids, dout = call.segment_ids, call.dout
        real = (ids > 0)[..., None]
        x, dt, A, B, C, D = (w.astype(np.float64) for w in call.operands.values())
        x, dt = x * real[..., None], dt * real
        serving = self.group(x.shape[2], B.shape[2])
        decay = self.decays((dt * A)[..., None], ids)
        B_, C_ = B[:, :, serving] * real[..., None], C[:, :, serving]
        out, backward = _recurrence(C_, B_, dt[..., None] * x, decay, None)
        out = (out + D[:, None] * x) * real[..., None]
        if dout is None:
            return round_to(call.dtype, out), {}
        dout_ = dout.astype(np.float64) * real[..., None]
        dC, dB, ddrive, ddecay, _ = backward(dout_)
        dexponent = (ddecay * decay).sum(axis=-1)
        gradients = {
            "x": (ddrive * dt[..., None] + dout_ * D[:, None]) * real[..., None],
            "dt": ((ddrive * x).sum(axis=-1) + dexponent * A) * real,
            "A": (dexponent * dt).sum(axis=(0, 1)),
            "B": _summed(dB, serving, B.shape[2]) * real[..., None],
            "C": _summed(dC, serving, C.shape[2]) * real[..., None],
            "D": (dout_ * x).sum(axis=(0, 1, 3)),
        }
        return round_to(call.dtype, out), {name: round_to(call.dtype, w) for name, w in gradients.items()}

    def decays(self, exponent: Array, segment_ids: Array) -> Array:
        """By what the state of the token before is multiplied, of ``[B, S, H, ..]``: 0 where a segment starts."""
        decay: Array = np.exp(exponent) * self.goes_on(segment_ids)[..., None, None]
        return decay

    def goes_on(self, segment_ids: Array) -> Array:
        """bool ``[B, S]``: whether the state comes over from the token before."""
        same = np.zeros(segment_ids.shape, bool)
        same[:, 1:] = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
        return same

    def key_head(self, heads: int, key_heads: int) -> Array:
        """int ``[H]``: the head of q and k that each head of v reads."""
        return np.arange(heads) // (heads // key_heads)

    def group(self, heads: int, groups: int) -> Array:
        """int ``[H]``: the group of B and C that each head reads."""
        return np.arange(heads) // (heads // groups)

    def unit(self, x: Array) -> Array:
        """q or k, each head of norm 1."""
        unit: Array = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
        return unit


def _recurrence(q: Array, k: Array, v: Array, decay: Array, beta: Array | None) -> tuple[Array, Backward]:
    """``o_t = S_t^T q_t`` of ``S_t = decay_t S_{t-1} + k_t c_t^T``, c being v or, with ``beta``, the correction.

    Args:
        q, k: ``[B, S, H, D]``.
        v: ``[B, S, H, E]``.
        decay: ``[B, S, H, D or 1]``.
        beta: ``[B, S, H]``.

    Returns:
        ``[B, S, H, E]``, and the function from its gradient to those of q, k, v, decay (as ``[B, S, H, D]``) and beta
        (0 without one).
    """
    tokens = q.shape[1]
    states = np.zeros((tokens + 1, q.shape[0], *q.shape[2:], v.shape[3]))
    faded, error = np.zeros_like(states[1:]), np.zeros_like(v)
    for t in range(tokens):
        faded[t] = decay[:, t, ..., None] * states[t]
        error[:, t] = v[:, t] if beta is None else v[:, t] - np.einsum("bhde,bhd->bhe", faded[t], k[:, t])
        written = error[:, t] if beta is None else beta[:, t, :, None] * error[:, t]
        states[t + 1] = faded[t] + k[:, t, ..., None] * written[:, :, None]
    out = np.einsum("sbhde,bshd->bshe", states[1:], q)

    def backward(dout: Array) -> tuple[Array, ...]:
        dk, dv, ddecay = np.zeros_like(k), np.zeros_like(v), np.zeros_like(k)
        dbeta, dstate = np.zeros(v.shape[:3]), np.zeros_like(states[0])
        for t in reversed(range(tokens)):
            dstate = dstate + q[:, t, ..., None] * dout[:, t, :, None]
            dwritten = np.einsum("bhde,bhd->bhe", dstate, k[:, t])
            if beta is None:
                dv[:, t] = dwritten
                dk[:, t] = np.einsum("bhde,bhe->bhd", dstate, v[:, t])
                dfaded = dstate
            else:
                dv[:, t] = beta[:, t, :, None] * dwritten
                dbeta[:, t] = (dwritten * error[:, t]).sum(axis=-1)
                written = beta[:, t, :, None] * error[:, t]
                dk[:, t] = np.einsum("bhde,bhe->bhd", dstate, written)
                dk[:, t] -= np.einsum("bhde,bhe->bhd", faded[t], dv[:, t])
                dfaded = dstate - k[:, t, ..., None] * dv[:, t, :, None]
            ddecay[:, t] = (dfaded * states[t]).sum(axis=-1)
            dstate = decay[:, t, ..., None] * dfaded
        return np.einsum("sbhde,bshe->bshd", states[1:], dout), dk, dv, ddecay, dbeta

    return out, backward


def _summed(x: Array, serving: Array, heads: int) -> Array:
    """``[B, S, H, D]`` to ``[B, S, heads, D]``: the heads that read the same one, added up."""
    summed = np.zeros((*x.shape[:2], heads, x.shape[3]))
    for head, read in enumerate(serving):
        summed[:, :, read] += x[:, :, head]
    return summed
