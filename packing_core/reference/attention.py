"""Attention inside documents, one document at a time: the oracle for every attention implementation.

Axis names: T tokens, H query heads, K key/value heads, G = H // K (query head h reads key/value head ``h // G``),
D query and key width, E value width, L tokens of the document at hand.

For query i and key j of one document, with s the scale (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 1):

    z_ij = s q_i . k_j                       scaled scores
    z_ij <- c tanh(z_ij / c)                 softcap c (Gemma 2, https://arxiv.org/abs/2408.00118, section 2)
    z_ij <- z_ij - m_h |i - j|               ALiBi slope m_h (Press et al. 2022, https://arxiv.org/abs/2108.12409)
    p_ij = exp(z_ij) / (exp(b_h) + sum_j' exp(z_ij'))   over visible keys j'; sink logit b_h, absent without sinks
    o_i  = sum_j p_ij v_j                    (sinks: gpt-oss, https://arxiv.org/abs/2508.10925, section 2)

Key j is visible to query i when both are of the same document, ``j <= i`` if causal, and ``|i - j| < window`` if there
is a window (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150): a window of W shows W keys, the query's own among
them. Tokens of one span, such as an image or a prefix, also see those after them in causal attention (Gemma 3,
https://arxiv.org/abs/2503.19786; prefix-LM: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.2.1): j is
visible when ``j <= i`` or both are of the same span, and ``i - j < window``. Where keys are selected
(:mod:`.selection`), no others are visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError, PackingError
from packing_core.reference.arithmetic import Array, WorkingDtype, operand, operands, plain, plain_gradients
from packing_core.reference.layout import Boundaries, DocumentPath, check_shape, documents


@dataclass(frozen=True)
class _AttentionOptions:
    """The options as they are passed; :func:`_checked` puts arrays and the scale in place of what was passed."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Any = None  # [K, G, 1, 1]
    alibi_slopes: Any = None  # [K, G, 1, 1]
    scale: Any = None
    dtype: WorkingDtype = "float64"
    spans: Any = None  # int64 [T]
    selected: Any = None  # bool [T, T]


@dataclass(frozen=True)
class _Softmax:
    """One document's softmax and what its backward pass needs."""

    p: Array  # [K, G, L, L], over keys; rows sum to less than 1 where a sink takes the rest
    p_sink: Array | None  # [K, G, L, 1]
    over_keys: Array  # [K, G, L, L], the softmax as it would be without the sink
    tanh: Array | None  # [K, G, L, L], of the scores over the softcap
    distance: Array  # [L, L], |i - j|
    lse: Array  # [K, G, L, 1], natural log of the sum over visible keys, the sink left out


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of the attention functions.

    causal: hide keys after the query (default True).
    window: keys visible to a query, its own included; None (the default) for no limit.
    softcap: bound on the scaled scores' absolute value; None for none.
    sinks: ``[H]`` logits that join the softmax's denominator and nothing else; None for none.
    alibi_slopes: ``[H]`` slopes of the linear bias; None for none.
    scale: factor on the scores; None for ``D ** -0.5``.
    dtype: working dtype that every operation is rounded to (default "float64").
    spans: ``[T]`` integers; tokens of one document with the same number, 0 or above, see each other both ways. None for
        no such tokens. Causal attention alone.
    selected: ``[T, T]`` booleans, the keys that each query may see; None for all.
    """

    causal: bool
    window: int | None
    softcap: float | None
    sinks: npt.ArrayLike | None
    alibi_slopes: npt.ArrayLike | None
    scale: float | None
    dtype: WorkingDtype
    spans: npt.ArrayLike | None
    selected: npt.ArrayLike | None


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    cu_seqlens: Boundaries,
    *,
    parents: npt.ArrayLike | None = None,
    **options: Unpack[AttentionOptions],
) -> npt.NDArray[np.float64]:
    """Softmax attention of each document over itself; the formula stands at the top of this module.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, K, D]`` with H a multiple of K.
        v: ``[T, K, E]``; E may differ from D.
        cu_seqlens: ``[S+1]`` boundaries of the documents, starting at 0.
        parents: ``[S]``, the segment that each one continues, -1 for none: a document is then a path from a root to a
            leaf (causal attention alone). None if every segment is a document.
        options: see `AttentionOptions`.

    Returns:
        ``[T, H, E]`` float64, 0 for tokens of no segment.

    Raises:
        LayoutError: shapes or boundaries contradict each other.
        PackingError: an option is out of its range.
    """
    q, k, v, chosen = _checked(q, k, v, **options)
    tokens, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    out = np.zeros_like(q, shape=(tokens, heads, v.shape[2]))
    for document in _documents(cu_seqlens, tokens, parents, chosen):
        q_, k_, v_ = (_by_group(x[document.tokens], groups) for x in (q, k, v))
        out[document.tokens] = _by_token(_softmax(q_, k_, chosen, document.tokens).p @ v_)
    return plain(out)


def attention_lse(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    cu_seqlens: Boundaries,
    *,
    parents: npt.ArrayLike | None = None,
    **options: Unpack[AttentionOptions],
) -> npt.NDArray[np.float64]:
    """The natural log of the softmax's sum over visible keys, without the sink: what kernels return beside the output.

    With sinks b the output is ``sigmoid(lse - b)`` times the output without them.

    Args:
        q, k, cu_seqlens, parents, options: as for `attention`.

    Returns:
        ``[T, H]`` float64, -inf for tokens of no segment.
    """
    q, k, _, chosen = _checked(q, k, k, **options)
    lse = np.full_like(q, -np.inf, shape=q.shape[:2])
    for document in _documents(cu_seqlens, q.shape[0], parents, chosen):
        q_, k_ = (_by_group(x[document.tokens], k.shape[1]) for x in (q, k))
        lse[document.tokens] = _by_token(_softmax(q_, k_, chosen, document.tokens).lse)[..., 0]
    return plain(lse)


def attention_vjp(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    cu_seqlens: Boundaries,
    dout: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    parents: npt.ArrayLike | None = None,
    **options: Unpack[AttentionOptions],
) -> dict[str, npt.NDArray[np.float64]]:
    """Gradients of ``sum(attention * dout) + sum(attention_lse * dlse)``.

    With ``dp_ij = dout_i . v_j`` the softmax gives ``dz_ij = p_ij (dp_ij - sum_j' p_ij' dp_ij')``, and for the sink
    ``db_h = -sum_i p_sink,i sum_j p_ij dp_ij``; the rest is the chain rule through softcap, bias and scale.

    Args:
        dout: ``[T, H, E]``, the gradient of the output; rows of tokens of no segment are ignored.
        dlse: ``[T, H]``, the gradient of the log-sum-exp; None for 0.
        q, k, v, cu_seqlens, parents, options: as for `attention`. The gradient of a token that several documents
            share is the sum over them.

    Returns:
        ``{"q", "k", "v"}``, and ``"sinks"`` and ``"alibi_slopes"`` when those were given, each in its input's shape.
    """
    q, k, v, chosen = _checked(q, k, v, **options)
    tokens, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    (dout,), dlse = operands(chosen.dtype, dout), operand(chosen.dtype, dlse)
    check_shape("dout", dout, (tokens, heads, v.shape[2]), "[T, H, E]")
    check_shape("dlse", dlse, (tokens, heads), "[T, H]")

    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dsinks = np.zeros_like(q, shape=(groups, heads // groups))
    dslopes = np.zeros_like(dsinks)
    for document in _documents(cu_seqlens, tokens, parents, chosen):
        own = document.own[:, None, None]
        q_, k_, v_ = (_by_group(x[document.tokens], groups) for x in (q, k, v))
        dout_ = _by_group(np.where(own, dout[document.tokens], 0), groups)
        softmax = _softmax(q_, k_, chosen, document.tokens)
        p = softmax.p
        dp = dout_ @ v_.swapaxes(-1, -2)
        delta = (p * dp).sum(axis=-1, keepdims=True)
        dz = p * (dp - delta)
        if dlse is not None:
            dz = dz + softmax.over_keys * _by_group(np.where(own, dlse[document.tokens][..., None], 0), groups)
        if softmax.p_sink is not None:
            dsinks -= (softmax.p_sink * delta).sum(axis=(-2, -1))
        if chosen.alibi_slopes is not None:
            dslopes -= (dz * softmax.distance).sum(axis=(-2, -1))
        if softmax.tanh is not None:
            dz = dz * (1.0 - softmax.tanh * softmax.tanh)
        dz = dz * chosen.scale
        dq[document.tokens] += _by_token(dz @ k_)
        dk[document.tokens] += _by_token((dz.swapaxes(-1, -2) @ q_).sum(axis=1, keepdims=True))
        dv[document.tokens] += _by_token((p.swapaxes(-1, -2) @ dout_).sum(axis=1, keepdims=True))

    of_sinks = None if chosen.sinks is None else dsinks.reshape(heads)
    of_slopes = None if chosen.alibi_slopes is None else dslopes.reshape(heads)
    return plain_gradients(q=dq, k=dk, v=dv, sinks=of_sinks, alibi_slopes=of_slopes)


def _documents(
    cu_seqlens: Boundaries, tokens: int, parents: npt.ArrayLike | None, options: _AttentionOptions
) -> Iterator[DocumentPath]:
    if parents is not None and not options.causal:
        raise PackingError("parents need causal attention: a segment that others continue must not see them")
    if parents is not None and options.spans is not None:
        raise PackingError("spans have no place in segments that continue others: pass spans or parents")
    return documents(cu_seqlens, tokens, parents)


def _softmax(q: Array, k: Array, options: _AttentionOptions, tokens: slice | npt.NDArray[np.int64]) -> _Softmax:
    """The softmax of one document, which ``tokens`` are of: q ``[K, G, L, D]``, k ``[K, 1, L, D]``."""
    z = (q @ k.swapaxes(-1, -2)) * options.scale
    tanh = None
    if options.softcap is not None:
        tanh = np.tanh(z / options.softcap)
        z = tanh * options.softcap
    token = np.arange(q.shape[-2])
    ahead = token[:, None] - token[None, :]  # query minus key
    if options.alibi_slopes is not None:
        z = z - options.alibi_slopes * np.abs(ahead)
    visible = np.full(ahead.shape, True)
    if options.causal:
        visible &= ahead >= 0
    if options.spans is not None:
        span = options.spans[tokens]
        visible |= (span[:, None] == span) & (span >= 0)
    if options.window is not None:
        visible &= (ahead if options.causal else np.abs(ahead)) < options.window
    if options.selected is not None:
        visible &= options.selected[tokens][:, tokens]
    z = np.where(visible, z, -np.inf)

    # The largest logit comes off first, or exp overflows. A query always sees some key, so it is finite.
    largest = z.max(axis=-1, keepdims=True)
    weight = np.exp(z - largest)
    total = weight.sum(axis=-1, keepdims=True)
    distance, lse, over_keys = np.abs(ahead), np.log(total) + largest, weight / total
    if options.sinks is None:
        return _Softmax(over_keys, None, over_keys, tanh, distance, lse)
    largest_with_sink = np.maximum(largest, options.sinks)
    rescale = np.exp(largest - largest_with_sink)
    sink = np.exp(options.sinks - largest_with_sink)
    total = total * rescale + sink
    return _Softmax(weight * rescale / total, sink / total, over_keys, tanh, distance, lse)


def _by_group(x: Array, groups: int) -> Array:
    """``[L, H, D]`` to ``[K, H // K, L, D]``, the axes in which a matrix product runs over tokens."""
    length, heads, width = x.shape
    return x.reshape(length, groups, heads // groups, width).transpose(1, 2, 0, 3)


def _by_token(x: Array) -> Array:
    """``[K, G, L, D]`` to ``[L, K * G, D]``."""
    groups, members, length, width = x.shape
    return x.transpose(2, 0, 1, 3).reshape(length, groups * members, width)


def _checked(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, **options: Unpack[AttentionOptions]
) -> tuple[Array, Array, Array, _AttentionOptions]:
    chosen = _AttentionOptions(**options)
    q, k, v = operands(chosen.dtype, q, k, v)
    check_shape("q", q, (None, None, None), "[T, H, D]")
    tokens, heads, width = q.shape
    check_shape("k", k, (tokens, None, width), "[T, K, D]")
    groups = k.shape[1]
    check_shape("v", v, (tokens, groups, None), "[T, K, E]")
    if groups == 0 or heads % groups:
        raise LayoutError(f"q has {heads} heads and k has {groups}: the first must be a multiple of the second")
    if (window := chosen.window) is not None and window < 1:
        raise PackingError(f"window is {window}: it counts visible keys, the query's own included, so it is at least 1")
    if chosen.softcap is not None and not chosen.softcap > 0:
        raise PackingError(f"softcap is {chosen.softcap}: it must be positive; pass None for none")

    spans = None if chosen.spans is None else np.asarray(chosen.spans)
    check_shape("spans", spans, (tokens,), "[T]")
    if spans is not None and not chosen.causal:
        raise PackingError("spans need causal attention: without it every token sees both ways")
    selected = None if chosen.selected is None else np.asarray(chosen.selected, np.bool_)
    check_shape("selected", selected, (tokens, tokens), "[T, T]")

    def per_head(name: str, x: npt.ArrayLike | None) -> Array | None:
        of_heads = operand(chosen.dtype, x)
        check_shape(name, of_heads, (heads,), "[H]")
        return None if of_heads is None else of_heads.reshape(groups, heads // groups, 1, 1)

    checked = replace(
        chosen,
        sinks=per_head("sinks", chosen.sinks),
        alibi_slopes=per_head("alibi_slopes", chosen.alibi_slopes),
        scale=width**-0.5 if chosen.scale is None else chosen.scale,
        spans=None if spans is None else spans.astype(np.int64),
        selected=selected,
    )
    return q, k, v, checked
