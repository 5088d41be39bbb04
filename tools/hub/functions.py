"""Packed attention, the gated delta rule, the short convolution and RoPE, under the signatures that transformers calls.

flash-attn's, flash-linear-attention's and causal-conv1d's arguments -> the metadata of the packed segments, made once
per batch -> the operations of ``torch_backend.ops``. What would change a result and is not served raises; what changes
none is named where it is an argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from packing_core.errors import UnsupportedError
from torch_backend.ops.attention.request import AttentionInputs, request_of
from torch_backend.ops.attention.triton import TRITON
from torch_backend.ops.conv import convolve
from torch_backend.ops.norm import unit_rows
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.rope import apply_rope
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule, gated_delta_rule_with_states
from torch_backend.segments import PackedMetadata

Value = TypeVar("Value")

__all__ = ["apply_rope", "causal_conv1d_fn", "chunk_gated_delta_rule", "flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attends inside each sequence, as flash-attn's function of this name does; the backward always repeats to the bit.

    Args:
        q: [T, H, D]. k: [S, K, D]. v: [S, K, Dv]. Heads of up to 512, Dv may differ from D.
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], boundaries of the sequences among the queries and the keys. Tokens
            after the last boundary are padding that attends to itself. A sequence has at least as many keys as queries,
            and its queries are the last of its tokens; where it has more, the boundaries are read by the host.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        dropout_p: 0.
        softmax_scale: D ** -0.5 if None.
        causal: no query sees later keys.
        window_size: keys before and after a query's own that it sees, -1 for all; causal attention ignores the second.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        alibi_slopes: [H].
        deterministic: has no effect, because no kernel uses atomics.
        s_aux: [H], sinks: a logit per head that joins the denominator alone.

    Returns:
        [T, H, Dv].

    Raises:
        UnsupportedError: dropout, an uneven window without ``causal``, or a device without Triton.
    """
    if dropout_p:
        raise UnsupportedError(f"dropout_p is {dropout_p} and these kernels drop nothing: set attention_dropout to 0")
    if q.shape[0] == k.shape[0]:  # no sequence has fewer keys than queries, so all have as many
        packed = _metadata(cu_seqlens_q, int(max_seqlen_q), q)
    else:
        packed = _with_more_keys(cu_seqlens_q, cu_seqlens_k, q)
    request = request_of(
        q,
        k,
        v,
        packed,
        causal=causal,
        window=_window(window_size, causal),
        softcap=softcap or None,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        scale=softmax_scale,
    )
    reason = TRITON.refuses(request)
    if reason is not None:
        raise UnsupportedError(f"attention in Triton {reason}")
    return TRITON(AttentionInputs(q, k, v, packed, s_aux, alibi_slopes), request)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attends inside each row: q [B, S, H, D], k and v [B, M, K, D] with M at least S; otherwise as above.

    Returns:
        [B, S, H, Dv].
    """
    (rows, length), keys = q.shape[:2], k.shape[1]
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    key_bounds = bounds if keys == length else bounds // length * keys
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux
    out = flash_attn_varlen_func(q, k, v, bounds, key_bounds, length, keys, *options)
    return out.view(rows, length, *out.shape[1:])


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs the gated delta rule of Yang et al. 2024 (https://arxiv.org/abs/2412.06464), restarted at each sequence.

    Args:
        query, key: [B, S, Q, K]. value: [B, S, H, V], H a multiple of Q.
        g: [B, S, H], the log of the decay. beta: [B, S, H].
        chunk_size: has no effect; the kernels choose their own.
        initial_state: [N, H, K, V], one for each sequence.
        output_final_state: also returns the states after each sequence.
        use_qk_l2norm_in_kernel: normalises query and key to unit length.
        **kwargs: ``cu_seqlens``, integers [N+1], boundaries among the B * S tokens; without it every row is a sequence.
            Tokens after the last one are padding, which only calls without states may have. ``scale`` of the output.
            Others are transformers' own and concern no kernel.

    Returns:
        [B, S, H, V] and the states [N, H, K, V], or None.

    Raises:
        UnsupportedError: an argument of fla changes the result and is not served.
    """
    _refuse(kwargs, *_CHANGE_THE_SCAN)
    rows, length = value.shape[:2]
    states = initial_state is not None or output_final_state
    packed = _of_rows(kwargs.get("cu_seqlens"), rows, length, value, states=states)
    q, k = (_unit(x) if use_qk_l2norm_in_kernel else x for x in (query, key))
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, value, g, beta))
    scale = kwargs.get("scale")
    if not states:
        out = gated_delta_rule(q, k, v, g, beta, packed, scale=scale)
        return out.view(value.shape).to(query.dtype), None
    out, last = gated_delta_rule_with_states(q, k, v, g, beta, packed, initial=initial_state, scale=scale)
    return out.view(value.shape).to(query.dtype), last if output_final_state else None


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolves each channel over the tokens before it in its sequence.

    Args:
        hidden_states: [B, C, S].
        weight: [C, W]. bias: [C].
        activation: None, ``silu`` or ``swish``, which is the same.
        **kwargs: the sequences, by one of ``seq_idx``, integers [B, S] that differ between neighbours, ``cu_seqlens``
            and ``cu_seq_lens_q``, boundaries among the B * S tokens. Others are transformers' own.

    Returns:
        [B, C, S].

    Raises:
        UnsupportedError: an activation other than silu, or states that enter or leave.
    """
    _refuse(kwargs, "initial_states", "final_states_out", "return_final_states", "initial_state", "output_final_state")
    if activation not in (None, "silu", "swish"):
        raise UnsupportedError(f"the convolution has no activation {activation!r}: pass silu or None")
    rows, _, length = hidden_states.shape
    seq_idx, bounds = kwargs.get("seq_idx"), kwargs.get("cu_seqlens", kwargs.get("cu_seq_lens_q"))
    if seq_idx is not None:
        positions = _remembered((seq_idx,), ("positions",), lambda: _positions(seq_idx).flatten())
    else:
        positions = _of_rows(bounds, rows, length, hidden_states).position_ids
    x = hidden_states.transpose(1, 2).flatten(0, 1)
    out = convolve(x, weight, bias, positions, activation is not None)
    return out.view(rows, length, -1).transpose(1, 2)


_CHANGE_THE_SCAN = (
    *("head_first", "state_v_first", "transpose_state_layout", "gk", "A_log", "dt_bias", "use_gate_in_kernel"),
    *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "cp_context"),
)


def _refuse(given: Mapping[str, Any], *names: str) -> None:
    """Raise for arguments of fla and causal-conv1d that change a result and that nothing here follows."""
    for name in names:
        if (value := given.get(name)) is not None and value is not False:
            raise UnsupportedError(f"{name} is given, which these kernels do not follow: leave it out")


def _window(size: tuple[int, int], causal: bool) -> int | None:
    left, right = size
    if left < 0 and (causal or right < 0):
        return None
    if not causal and left != right:
        raise UnsupportedError(f"window_size is {size}: without causal both sides must be the same")
    return left + 1


def _unit(x: Tensor) -> Tensor:
    if runs_triton(x):
        return unit_rows(x)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _positions(seq_idx: Tensor) -> Tensor:
    """Returns each token's place in its sequence, [B, S], from numbers that differ between neighbours."""
    at = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand(seq_idx.shape)
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return at - at.where(starts, 0).cummax(1).values


def _of_rows(bounds: Tensor | None, rows: int, length: int, like: Tensor, *, states: bool = False) -> PackedMetadata:
    """Returns the sequences of some rows, each row one without ``bounds``.

    With ``states`` they have the numbers of ``bounds``, which then cover every token. Without, tokens after the last
    boundary are padding, and every row's end is a boundary.
    """

    def make() -> PackedMetadata:
        if bounds is not None and not states:
            return PackedMetadata.from_boundaries(
                bounds, rows=rows, row_length=length, max_seqlen=length, device=like.device
            )
        ends = torch.arange(0, rows * length + 1, length) if bounds is None else bounds
        return PackedMetadata(ends.to(like.device, torch.int32), length, rows * length)

    return _remembered(() if bounds is None else (bounds,), ("rows", rows, length, like.device, states), make)


# What was made of the last batch's boundaries: every layer of a model calls with the same, and work lists hang on them.
_last: list[tuple[tuple[weakref.ref[Tensor], ...], tuple[Any, ...], Any]] = []
_KEPT = 4


def _metadata(bounds: Tensor, longest: int, q: Tensor) -> PackedMetadata:
    def make() -> PackedMetadata:
        tokens = q.shape[0]
        return PackedMetadata.from_boundaries(bounds, rows=1, row_length=tokens, max_seqlen=longest, device=q.device)

    return _remembered((bounds,), ("attention", longest, q.shape[0], q.device), make)


def _with_more_keys(bounds: Tensor, key_bounds: Tensor, q: Tensor) -> PackedMetadata:
    def make() -> PackedMetadata:
        lengths, key_lengths = bounds.diff().tolist(), key_bounds.diff().tolist()  # the one read from the device
        return PackedMetadata.of_last_tokens(lengths, key_lengths, device=q.device)

    return _remembered((bounds, key_bounds), ("more keys", q.device), make)


def _remembered(tensors: tuple[Tensor, ...], values: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """Returns what was made of these very tensors, unless they were written to since.

    Nothing is remembered inside a graph, whose replays read other boundaries at the same place, nor in inference mode,
    whose tensors count no writes and enter no backward.
    """
    if _in_a_graph() or torch.is_inference_mode_enabled() or any(t.is_inference() for t in tensors):
        return make()
    key = (*values, *(t._version for t in tensors))
    for references, known, found in _last:
        same = len(references) == len(tensors) and all(r() is t for r, t in zip(references, tensors, strict=True))
        if same and known == key:
            remembered: Value = found
            return remembered
    made = make()
    _last[:] = [(tuple(weakref.ref(t) for t in tensors), key, made), *_last[: _KEPT - 1]]
    return made


def _in_a_graph() -> bool:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or capturing
