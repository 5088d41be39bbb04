"""The gated delta rule with its state reset at each document: the oracle for linear-attention layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packing_core.reference.arithmetic import Array, WorkingDtype, operands, plain, plain_gradients
from packing_core.reference.layout import Boundaries, check_shape, segment_slices


def gated_delta_rule(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    g: npt.ArrayLike,
    beta: npt.ArrayLike,
    cu_seqlens: Boundaries,
    *,
    scale: float | None = None,
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """Linear attention that corrects its memory, one state per head, reset per segment.

    Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464, eq. 10): for each head, with a
    state ``S[D, E]`` that is 0 before the segment's first token:

        S'  = exp(g_t) S_{t-1}                                   the memory fades
        S_t = S' + k_t beta_t (v_t - S'^T k_t)^T                 what it holds for k_t moves towards v_t
        o_t = s S_t^T q_t

    A ``g`` per channel of k instead of one per head is Kimi Delta Attention (https://arxiv.org/abs/2510.26692, eq. 1);
    ``g = 0`` is the delta rule. Where a model normalises q and k, it does so before.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, H, D]``.
        v: ``[T, H, E]``.
        g: ``[T, H]`` or ``[T, H, D]``, the log of the decay.
        beta: ``[T, H]``, the strength of the correction.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0.
        scale: the factor s on the output; default ``D ** -0.5``.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[T, H, E]`` float64, 0 for tokens of no segment.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
    """
    q, k, v, g, beta, scale = _checked(q, k, v, g, beta, scale, dtype)
    out = np.zeros_like(v)
    for document in segment_slices(cu_seqlens, q.shape[0]):
        _, _, states = _memory(k[document], v[document], g[document], beta[document])
        out[document] = (states * q[document][..., None]).sum(axis=-2) * scale
    return plain(out)


def gated_delta_rule_vjp(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    g: npt.ArrayLike,
    beta: npt.ArrayLike,
    cu_seqlens: Boundaries,
    dout: npt.ArrayLike,
    *,
    scale: float | None = None,
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """Gradients of ``sum(gated_delta_rule * dout)``, by running the recurrence from the last token to the first.

    With ``e_t = v_t - S'^T k_t`` and the state's gradient dS, in which the output's share ``s q_t do_t^T`` is included:
    ``dv_t = beta_t dS^T k_t``, ``dbeta_t = e_t . dS^T k_t``, ``dk_t = dS beta_t e_t - S' dv_t``,
    ``dS' = dS - k_t dv_t^T``, ``dg_t = sum(dS' * S')`` and ``exp(g_t) dS'`` goes on to the token before.

    Args:
        dout: ``[T, H, E]``, the gradient of the output.
        q, k, v, g, beta, cu_seqlens, scale, dtype: as for `gated_delta_rule`.

    Returns:
        ``{"q", "k", "v", "g", "beta"}``, each in its input's shape.
    """
    per_head = np.ndim(g) == 2
    q, k, v, g, beta, scale = _checked(q, k, v, g, beta, scale, dtype)
    (dout,) = operands(dtype, dout)
    check_shape("dout", dout, v.shape, "[T, H, E]")
    dq, dk, dv, dbeta = (np.zeros_like(x) for x in (q, k, v, beta))
    dg = np.zeros_like(k)
    for document in segment_slices(cu_seqlens, q.shape[0]):
        faded, error, states = _memory(k[document], v[document], g[document], beta[document])
        dstate = np.zeros_like(states[0])
        for i, t in reversed(list(enumerate(range(document.start, document.stop)))):
            dq[t] = (states[i] * dout[t][:, None, :]).sum(axis=-1) * scale
            dstate = dstate + q[t][..., None] * dout[t][:, None, :] * scale
            dcorrection = (dstate * k[t][..., None]).sum(axis=-2)
            dbeta[t] = (dcorrection * error[i]).sum(axis=-1)
            dv[t] = beta[t][:, None] * dcorrection
            correction = beta[t][:, None] * error[i]
            dk[t] = (dstate * correction[:, None, :] - faded[i] * dv[t][:, None, :]).sum(axis=-1)
            dfaded = dstate - k[t][..., None] * dv[t][:, None, :]
            dg[t] = (dfaded * faded[i]).sum(axis=-1)
            dstate = np.exp(g[t])[..., None] * dfaded
    return plain_gradients(q=dq, k=dk, v=dv, g=dg.sum(axis=-1) if per_head else dg, beta=dbeta)


def _memory(k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array, Array]:
    """One document's S' ``[L, H, D, E]``, error ``v - S'^T k`` ``[L, H, E]`` and S ``[L, H, D, E]`` at each token."""
    states = np.zeros_like(k, shape=(*k.shape, v.shape[-1]))
    faded, error = np.zeros_like(states), np.zeros_like(v)
    state = states[0]
    for t in range(len(k)):
        faded[t] = np.exp(g[t])[..., None] * state
        error[t] = v[t] - (faded[t] * k[t][..., None]).sum(axis=-2)
        states[t] = faded[t] + k[t][..., None] * (beta[t][:, None] * error[t])[:, None, :]
        state = states[t]
    return faded, error, states


def _checked(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    g: npt.ArrayLike,
    beta: npt.ArrayLike,
    scale: float | None,
    dtype: WorkingDtype,
) -> tuple[Array, Array, Array, Array, Array, float]:
    """Operands under the policy, with ``g`` as ``[T, H, D]`` or, per head, ``[T, H, 1]``."""
    q, k, v, g, beta = operands(dtype, q, k, v, g, beta)
    check_shape("q", q, (None, None, None), "[T, H, D]")
    tokens, heads, width = q.shape
    check_shape("k", k, (tokens, heads, width), "[T, H, D]")
    check_shape("v", v, (tokens, heads, None), "[T, H, E]")
    check_shape("beta", beta, (tokens, heads), "[T, H]")
    if g.ndim == 2:
        check_shape("g", g, (tokens, heads), "[T, H]")
        g = g[..., None]
    else:
        check_shape("g", g, (tokens, heads, width), "[T, H] or [T, H, D]")
    return q, k, v, g, beta, width**-0.5 if scale is None else scale
