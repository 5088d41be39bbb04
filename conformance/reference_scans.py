"""The reference backend's delta rule, Mamba-2 scan and convolution: whole rows, token by token, in numpy.

Segments, and perhaps their parents -> the token that each token follows, -1 for none -> the recurrence along that, with
the correction of the delta rule or without, or the window of the convolution. Each rule that a mutant breaks is a
method of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.draws import round_to
from conformance.scan_cases import normalised_vjp
from packing_core.protocol import Array, Backend, Gradients, OperationCall, segments, takes_call

Backward = Callable[[Array], tuple[Array, ...]]


class ScanMethods(Backend):
    """`delta_rule`, `ssd` and `convolution`."""

    @takes_call("q", "k", "v", "g", "beta")
    def delta_rule(self, call: OperationCall) -> tuple[Array, Gradients]:
        ids, dout, normalise = call.segment_ids, call.dout, call.options.get("normalise", False)
        q, k, v, g, beta = (x.astype(np.float64) for x in call.operands.values())
        given, real, heads = (q, k), (ids > 0)[..., None], v.shape[2]
        if normalise:
            q, k = self.unit(q), self.unit(k)
        serving = self.key_head(heads, k.shape[2])
        decay = self.decays(g if g.ndim == 4 else g[..., None])
        scale = q.shape[3] ** -0.5
        q, k, beta = q[:, :, serving] * scale, k[:, :, serving] * real[..., None], beta * real
        out, backward = _recurrence(q, k, v, decay, beta, *self._order(call))
        out = out * real[..., None]
        if dout is None:
            return round_to(call.dtype, out), {}
        dq, dk, dv, ddecay, dbeta = backward(dout.astype(np.float64) * real[..., None])
        dg = ddecay * decay
        gradients = {
            "q": _summed(dq * scale, serving, given[0].shape[2]),
            "k": _summed(dk, serving, given[1].shape[2]),
            "v": dv,
            "g": dg if g.ndim == 4 else dg.sum(axis=-1),
            "beta": dbeta,
        }
        if normalise:
            gradients |= {name: normalised_vjp(x, gradients[name]) for name, x in zip("qk", given, strict=True)}
        gradients = {name: x * real.reshape(real.shape + (1,) * (x.ndim - 3)) for name, x in gradients.items()}
        return round_to(call.dtype, out), {name: round_to(call.dtype, x) for name, x in gradients.items()}

    @takes_call("x", "dt", "A", "B", "C", "D")
    def ssd(self, call: OperationCall) -> tuple[Array, Gradients]:
        ids, dout = call.segment_ids, call.dout
        real = (ids > 0)[..., None]
        x, dt, A, B, C, D = (w.astype(np.float64) for w in call.operands.values())
        x, dt = x * real[..., None], dt * real
        serving = self.group(x.shape[2], B.shape[2])
        decay = self.decays((dt * A)[..., None])
        B_, C_ = B[:, :, serving] * real[..., None], C[:, :, serving]
        out, backward = _recurrence(C_, B_, dt[..., None] * x, decay, None, *self._order(call))
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

    @takes_call("x", "weight", "bias")
    def convolution(self, call: OperationCall) -> tuple[Array, Gradients]:
        x, weight, bias = (w.astype(np.float64) for w in call.operands.values())
        real, row = (call.segment_ids > 0)[..., None], np.arange(len(x))[:, None]
        before, hands_back = self._order(call)
        seen = [np.broadcast_to(np.arange(x.shape[1]), before.shape)]  # by lag: the token that each token sees
        credited = seen[:]  # and the one that gets the gradient
        for _ in range(weight.shape[1] - 1):
            last = seen[-1]
            seen.append(np.where(last >= 0, before[row, last], -1))
            credited.append(np.where(hands_back[row, last] & (credited[-1] >= 0), seen[-1], -1))
        columns = self.columns(weight.shape[1])
        padded = np.concatenate([x * real, np.zeros_like(x[:, :1])], axis=1)  # -1 is the zero at the end
        out = (bias + sum(padded[row, at] * weight[:, c] for at, c in zip(seen, columns, strict=True))) * real
        if call.dout is None:
            return round_to(call.dtype, out), {}
        dout = call.dout.astype(np.float64) * real
        dx, dweight = np.zeros_like(padded), np.zeros_like(weight)
        for at, to, c in zip(seen, credited, columns, strict=True):
            np.add.at(dx, (row, to), dout * weight[:, c])
            dweight[:, c] = (padded[row, at] * dout).sum(axis=(0, 1))
        gradients = {"x": dx[:, :-1] * real, "weight": dweight, "bias": dout.sum(axis=(0, 1))}
        return round_to(call.dtype, out), {name: round_to(call.dtype, w) for name, w in gradients.items()}

    def _order(self, call: OperationCall) -> tuple[Array, Array]:
        before = self.before(call.segment_ids, call.parents)
        return before, self.hands_back(before)

    def before(self, segment_ids: Array, parents: Array | None) -> Array:
        """int ``[B, S]``: the token of the row that each one follows in its document; -1 for none."""
        before: Array = np.where(self.goes_on(segment_ids), np.arange(segment_ids.shape[1]) - 1, -1)
        places = segments(segment_ids)
        for (row, start, _), parent in zip(places, [] if parents is None else parents.tolist(), strict=False):
            if parent >= 0:
                before[row, start] = places[parent][2] - 1
        return before

    def hands_back(self, before: Array) -> Array:
        """bool ``[B, S]``: whether a token hands the gradient of its state back to the token that it follows."""
        return before >= 0

    def columns(self, width: int) -> list[int]:
        """The column of the convolution's weight for each lag."""
        return list(reversed(range(width)))

    def decays(self, exponent: Array) -> Array:
        """By what the state of the token before is multiplied, of ``[B, S, H, ..]``."""
        decay: Array = np.exp(exponent)
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


def _recurrence(
    q: Array, k: Array, v: Array, decay: Array, beta: Array | None, before: Array, hands_back: Array
) -> tuple[Array, Backward]:
    """``o_t = S_t^T q_t`` of ``S_t = decay_t S_{before t} + k_t c_t^T``, c being v or, with ``beta``, the correction.

    Args:
        q, k: ``[B, S, H, D]``.
        v: ``[B, S, H, E]``.
        decay: ``[B, S, H, D or 1]``.
        beta: ``[B, S, H]``.
        before: int ``[B, S]``, the token whose state each one starts from, an earlier one; -1 for zero.
        hands_back: bool ``[B, S]``, whether the gradient of that state counts.

    Returns:
        ``[B, S, H, E]``, and the function from its gradient to those of q, k, v, decay (as ``[B, S, H, D]``) and beta
        (0 without one).
    """
    tokens, row, before = q.shape[1], np.arange(len(q)), before + 1
    states = np.zeros((tokens + 1, q.shape[0], *q.shape[2:], v.shape[3]))  # after each token, the zeros first
    faded, error = np.zeros_like(states[1:]), np.zeros_like(v)
    for t in range(tokens):
        faded[t] = decay[:, t, ..., None] * states[before[:, t], row]
        error[:, t] = v[:, t] if beta is None else v[:, t] - np.einsum("bhde,bhd->bhe", faded[t], k[:, t])
        written = error[:, t] if beta is None else beta[:, t, :, None] * error[:, t]
        states[t + 1] = faded[t] + k[:, t, ..., None] * written[:, :, None]
    out = np.einsum("sbhde,bshd->bshe", states[1:], q)

    def backward(dout: Array) -> tuple[Array, ...]:
        dk, dv, ddecay = np.zeros_like(k), np.zeros_like(v), np.zeros_like(k)
        dbeta, dstates = np.zeros(v.shape[:3]), np.zeros_like(states)
        for t in reversed(range(tokens)):
            dstate = dstates[t + 1] + q[:, t, ..., None] * dout[:, t, :, None]
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
            ddecay[:, t] = (dfaded * states[before[:, t], row]).sum(axis=-1)
            counted = hands_back[:, t, None, None, None]
            dstates[before[:, t], row] += decay[:, t, ..., None] * dfaded * counted
        return np.einsum("sbhde,bshe->bshd", states[1:], dout), dk, dv, ddecay, dbeta

    return out, backward


def _summed(x: Array, serving: Array, heads: int) -> Array:
    """``[B, S, H, D]`` to ``[B, S, heads, D]``: the heads that read the same one, added up."""
    summed = np.zeros((*x.shape[:2], heads, x.shape[3]))
    for head, read in enumerate(serving):
        summed[:, :, read] += x[:, :, head]
    return summed
