"""Packed attention in layers that compute attention themselves, without transformers' interface.

Most such layers compute it in a method, ``_attn(query, key, value, mask)``, which becomes :func:`_attend`. The others
compute it in their forward, and a packed call runs one of :data:`_FORWARDS` instead. Either receives the segments in
place of the mask, and keeps the layer's projections, rotation and output. Without segments the layer's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_backend.hf.anatomy.families import ATTENTION_METHOD, OWN_FORWARDS, OWN_METHODS
from torch_backend.hf.anatomy.layers import definer
from torch_backend.hf.attention import packed_attention
from torch_backend.hf.forward import PackedForward, forward_among
from torch_backend.hf.override import Attribute, Edit, LayerOverride
from torch_backend.ops.rope import apply_rope

_BIAS = "build_alibi_tensor"  # Bloom's decoder has it, which makes the bias for its layers
_ON_ROW = "_crosspack_attention_forward"


# -- layers with a method -------------------------------------------------------------------------------------------


def _attend(
    kind: str, layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *others: Any
) -> Any:
    """Stands in for the method of a layer that computes attention: q, k, v [B, H, S, D] -> [B, H, S, D]."""
    if not isinstance(attention_mask, PackedForward):
        return getattr(type(layer), ATTENTION_METHOD)(layer, query, key, value, attention_mask, *others)
    return [_attention(layer, query, key, value, attention_mask, **_OPTIONS[kind](layer)).transpose(1, 2), None]


def _attention(
    layer: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: PackedForward,
    *,
    dropout: Any = 0.0,
    transposed: bool = False,
    **options: Any,
) -> Tensor:
    """Packed attention of q, k, v [B, H, S, D] -> [B, S, H, D].

    Args:
        dropout: a module, or a probability in training.
        transposed: whether k is [B, H, D, S].
        options: of :func:`packed_attention`.
    """
    k = k.transpose(2, 3) if transposed else k
    dropout = getattr(dropout, "p", dropout) if getattr(dropout, "training", layer.training) else 0.0
    options = {"sliding_window": None, **options}
    return packed_attention(layer, q, k, v, forward, before="", dropout=dropout, **options)[0]


# the options of a layer's attention; GPT-Neo's products are not scaled, and windowed in every second layer
_OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gpt_j": lambda layer: {"dropout": layer.attn_dropout},
    "gpt_neo": lambda layer: {
        "dropout": layer.attn_dropout,
        "scaling": 1.0,
        "sliding_window": layer.config.window_size if layer.attention_type == "local" else None,
    },
    "gpt_neox_japanese": lambda layer: {"dropout": layer.attention_dropout},
    "openai": lambda layer: {
        "dropout": layer.attn_dropout,
        "scaling": None if layer.scale else 1.0,
        "transposed": True,
    },
}


# -- layers without -------------------------------------------------------------------------------------------------


def _forward_of(original: type[nn.Module]) -> dict[str, Any]:
    return {_ON_ROW: _FORWARDS[OWN_FORWARDS[definer(original, "forward").__name__]]}


def _forward(layer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward = forward_among((*args, *kwargs.values()))
    if forward is None:
        return call(*args, **kwargs)
    return layer.__dict__[_ON_ROW](layer, forward, *args, **kwargs), None


def _bert(layer: Any, forward: PackedForward, hidden_states: Tensor, **others: Any) -> Tensor:
    """Attends in an encoder; the projection of its output is a module of its own."""
    heads = (layer.num_attention_heads, -1)
    q, k, v = (x(hidden_states).unflatten(-1, heads).transpose(1, 2) for x in (layer.query, layer.key, layer.value))
    return _attention(layer, q, k, v, forward, dropout=layer.dropout, is_causal=layer.is_decoder).flatten(2)


def _bloom(
    layer: Any, forward: PackedForward, hidden_states: Tensor, residual: Tensor, *, alibi: Tensor, **others: Any
) -> Tensor:
    q, k, v = layer._reshape(layer.query_key_value(hidden_states))
    out = _attention(layer, q, k, v, forward, dropout=layer.attention_dropout, alibi_slopes=_slopes(alibi))
    return residual + F.dropout(layer.dense(out.flatten(2)), layer.hidden_dropout, layer.training)


def _mpt(layer: Any, forward: PackedForward, hidden_states: Tensor, *, position_bias: Tensor, **others: Any) -> Tensor:
    qkv = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv)
    q, k, v = (x.unflatten(-1, (layer.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))
    slopes = _slopes(position_bias)
    dropout, scale = layer.attn_dropout_p, layer.softmax_scale
    out = _attention(layer, q, k, v, forward, dropout=dropout, scaling=scale, alibi_slopes=slopes)
    return layer.out_proj(out.flatten(2))


def _build_bias(decoder: nn.Module, attention_mask: Any, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Stands in for Bloom's bias [B * H, 1, S]; of packed rows, that of two tokens [H, 1, 2], which has the slopes."""
    if isinstance(attention_mask, PackedForward):
        attention_mask, dtype = torch.ones(1, 2, device=attention_mask.segments.device), torch.float32
    bias: Tensor = getattr(type(decoder), _BIAS)(decoder, attention_mask, num_heads, dtype)
    return bias


def _slopes(bias: Tensor) -> Tensor:
    """The slopes [H] of ALiBi, from the bias [H, 1, S] of a document's keys, S at least 2."""
    return bias[:, 0, -1] - bias[:, 0, -2]


def _falcon(
    layer: Any,
    forward: PackedForward,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **others: Any,
) -> Tensor:
    """Drops no attention weights, as its modeling file does not without ALiBi."""
    q, k, v = (x.transpose(1, 2) for x in layer._split_heads(layer.query_key_value(hidden_states)))
    k, v = (x[:, :: x.shape[1] // layer.num_kv_heads] for x in (k, v))  # which it may have repeated for every query
    cos, sin = (x[..., : x.shape[-1] // 2] for x in position_embeddings)
    q, k = apply_rope(q, k, cos, sin, heads_first=True)
    return layer.dense(_attention(layer, q, k, v, forward).flatten(2))


def _xglm(layer: Any, forward: PackedForward, hidden_states: Tensor, **others: Any) -> Tensor:
    heads = hidden_states.shape[:-1] + (layer.num_heads, layer.head_dim)
    q, k, v = (x(hidden_states).view(heads).transpose(1, 2) for x in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = _attention(layer, q, k, v, forward, dropout=layer.dropout, scaling=layer.scaling)
    return layer.out_proj(out.flatten(2))


# forwards of packed calls: the layer, the segments and the arguments -> [B, S, E]
_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "bert": _bert,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
    "xglm": _xglm,
}


# -- the edit ---------------------------------------------------------------------------------------------------------


def edits(decoder: nn.Module, layers: Iterable[nn.Module]) -> Iterator[Edit]:
    """The edits of layers that compute attention themselves, and of their decoder."""
    for layer in layers:
        if keeps_its_forward(layer):
            kind = OWN_METHODS[definer(type(layer), ATTENTION_METHOD).__name__]
            yield Attribute(layer, ATTENTION_METHOD, partial(_attend, kind, layer))
        else:
            yield LayerOverride(layer, _forward, _forward_of)
    if hasattr(type(decoder), _BIAS):
        yield Attribute(decoder, _BIAS, partial(_build_bias, decoder))


def keeps_its_forward(layer: nn.Module) -> bool:
    """Returns whether a layer's forward runs in packed calls, so that its rotation can be another."""
    return hasattr(type(layer), ATTENTION_METHOD)
