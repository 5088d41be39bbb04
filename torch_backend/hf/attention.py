"""The attention and mask functions that a patched model runs through transformers' own registries.

An attention layer looks up ``config._attn_implementation`` among the registered functions; the patch sets it to
``crosspack_`` followed by the name it had. Under that name, :func:`packed_attention` runs packed attention where the
mask is a :class:`PackedForward` and calls the function of the old name otherwise; the mask function is the old one.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import UnsupportedModelError
from packing_core.extras import require
from torch_backend.context_parallel.rank_attention import NOT_CROSSED, MethodChoice, choose_method, context_attention
from torch_backend.hf.anatomy.families import WITHOUT_EFFECT
from torch_backend.hf.forward import AttentionChoice, PackedForward, forward_among
from torch_backend.hf.inputs.arguments import HARMLESS, refuse_without_carrier
from torch_backend.hf.latents import latent_of
from torch_backend.hf.override import original_class
from torch_backend.ops.attention import AttentionRequest, choose, request_of, run
from torch_backend.ops.attention.index_loss import index_loss
from torch_backend.ops.attention.selected import SelectedKeys, selected_attention, words_of
from torch_backend.segments import PackedMetadata, refined

require("transformers", extra="hf")

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

__all__ = ["PREFIX", "DecoderLayer", "PreTrainedModel", "packed_attention", "register", "softcap_of", "stands_over"]

PREFIX = "crosspack_"
KIND = "_crosspack_kind_of_layer"  # the attribute of an attention layer that names its kind
_NAMES = {"eager", "sdpa"}  # implementations that forwards of transformers compare with the config's
TOWER_SEGMENTS = "tower_segments"  # the keyword of the segments that a vision tower's layer attends inside
PACKED = "packed"  # the keyword under which a tower passes on its packed call


def register(name: str) -> str:
    """Register the packed functions over the attention implementation ``name`` and return their own name."""
    packed_name = PREFIX + name
    if packed_name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(packed_name, partial(packed_attention, before=name))
        AttentionMaskInterface.register(packed_name, partial(_mask_before, before=name))
    return packed_name


def unregistered(name: str) -> str:
    """The name that a packed name stands over."""
    return name.removeprefix(PREFIX)


def stands_over(config: Any) -> str:
    """The implementation that packed attention stands over: the one a config names, if it honours the softcap.

    Transformers' sdpa has none: 5.17 leaves the softcap out, later versions raise.
    """
    name = unregistered(config._attn_implementation)
    return "eager" if name == "sdpa" and softcap_of(config) else name


def softcap_of(config: Any) -> float | None:
    """The softcap of a model's attention, None if it has none."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None)


@dataclass
class AttentionName:
    """A config names the packed attention function instead of the implementation that it had.

    Attributes:
        before: that implementation, over: the one that unpacked calls run.
    """

    config: Any
    before: str = ""
    over: str = ""

    def apply(self) -> None:
        self.before, self.over = unregistered(self.config._attn_implementation), stands_over(self.config)
        self.config._attn_implementation_internal = register(self.over)

    def undo(self) -> None:
        if self.in_force:
            self.config._attn_implementation_internal = self.before

    @property
    def in_force(self) -> bool:
        """Returns whether the config still names the packed function."""
        return bool(self.config._attn_implementation == PREFIX + self.over)


def under_own_name(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of an attention layer, whose config names what it named before the patch if the call is not packed.

    Layers with indexers compare the name, and mask the keys that are not selected for the names that they know alone.
    """
    forward = original_class(layer).forward
    if not compares_names(forward) or forward_among((*args, *kwargs.values())) is not None:
        return call(*args, **kwargs)
    before = copy.copy(layer)  # other threads call the layer itself
    before.config = copy.copy(layer.config)
    before.config._attn_implementation_internal = unregistered(layer.config._attn_implementation)
    return forward(before, *args, **kwargs)


@cache
def compares_names(forward: Callable[..., Any]) -> bool:
    """Returns whether the forward of an attention layer holds the name of an implementation."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    constants = () if code is None else code.co_consts
    return any(_NAMES & {*(x if isinstance(x, tuple | frozenset) else (x,))} for x in constants)


def _mask_before(*args: Any, before: str, **kwargs: Any) -> Any:
    """The mask of a batch that is not packed; transformers gives implementations without a mask function none."""
    if before not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[before](*args, **kwargs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    before: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of every patched layer.

    Args:
        module: the attention layer.
        query, key, value: [B, H, S, D], [B, K, S, D], [B, K, S, Dv].
        attention_mask: a PackedForward in a packed forward; whatever ``before`` understands otherwise.
        before: the implementation that was in force, called with all arguments unchanged when nothing is packed.
        args, kwargs: as transformers passes them.

    Returns:
        [B, S, H, Dv], and None for the attention weights.

    Raises:
        UnsupportedModelError: a packed forward asks for something that would not be exact.
    """
    if (segments := kwargs.pop(TOWER_SEGMENTS, None)) is not None:
        scale, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
        tower = kwargs.get(PACKED)
        asked = None if tower is None else tower.forward.tower_requests[tower.kind]
        return _of_tower(query, key, value, segments, asked, scale=scale, dropout=dropout), None
    if not isinstance(attention_mask, PackedForward):
        refuse_without_carrier(module, kwargs)
        return _function_before(before, module)(module, query, key, value, attention_mask, *args, **kwargs)
    if "sliding_window" not in kwargs and "flash" not in before:
        kwargs["sliding_window"] = _window_of_mask(module)
    return _packed(module, query, key, value, attention_mask, *args, **kwargs)


def causal_mask(module: Any, rows: Tensor) -> Tensor | None:
    """The mask that an attention layer takes for a batch [n, L, ...] without padding before its end.

    The eager functions need one, and layers that see their own chunk of a document alone: [1, 1, L, L], 0 where a key
    is visible and the least finite number elsewhere; for SDPA whether it is visible, in bool.

    Raises:
        UnsupportedModelError: a document is longer than a chunk, and the layer's attention takes no such mask.
    """
    name, length, chunk = unregistered(module.config._attn_implementation), rows.shape[1], _chunk(module)
    if (chunk is None or length <= chunk) and name != "eager":
        return None
    if name not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"{_where(module)} sees chunks of {chunk:,} tokens and counts those of a document of {length:,}, which "
            f'{name} cannot: load the model with attn_implementation="sdpa"'
        )
    places = torch.arange(length, device=rows.device)
    chunks = places // (chunk or length)
    hidden = (places[:, None] < places) | (chunks[:, None] != chunks)
    if name == "sdpa":
        return ~hidden[None, None]
    return rows.new_zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(rows.dtype).min)


def _function_before(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    # "eager" is no registered name: each modeling file has a function of its own.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # transformers 5.0 has no get_interface, and nothing that it would do beyond get
    get = getattr(ALL_ATTENTION_FUNCTIONS, "get_interface", ALL_ATTENTION_FUNCTIONS.get)
    function: Callable[..., tuple[Tensor, Tensor | None]] = get(name, eager)
    return function


def _packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedForward,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    indices = next((x for x in (indices, block_indices, mask.selected) if x is not None), None)
    harmless = {*HARMLESS, *WITHOUT_EFFECT}
    unknown = sorted(k for k, v in others.items() if v is not None and v is not False and k not in harmless)
    if unknown:
        raise UnsupportedModelError(
            f"{_where(module)} passes {', '.join(unknown)} to attention, which packing cannot honour: "
            "train the model unpacked"
        )
    if others.get("output_attentions"):
        raise UnsupportedModelError(
            f"{_where(module)}: packed attention has no attention weights to return: leave output_attentions out"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"{_where(module)} has {key.shape[2]} keys for {query.shape[2]} queries: "
            "a packed forward takes no cache and no prefix"
        )
    packed = mask.segments if (chunk := _chunk(module)) is None else refined(mask.segments, chunk)
    if packed.spans is not None and not _sees_both_ways(module, mask):
        packed = packed.without_spans
    rows, heads, length, _ = query.shape
    latent = latent_of(module, key)
    query, key, value = _same_dtype(query, key, value)
    q, k, v = (x.transpose(1, 2).reshape(rows * length, x.shape[1], x.shape[3]) for x in (query, key, value))
    # PaliGemma's layers say that they are not causal, and leave it to its mask
    causal = packed.spans is not None or bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedMetadata,
        sinks: Tensor | None,
        crossing: MethodChoice | None = None,
    ) -> Tensor:
        request = request_of(
            q,
            k,
            v,
            packed,
            causal=causal,
            window=sliding_window,
            softcap=softcap or None,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            dropout=dropout,
            scale=scaling,
        )
        name, request = choose(request, packed, mask.implementation)
        long = None if indices is None or not indices.shape[-1] else mask.long
        if indices is not None and long is not None:
            keys = SelectedKeys(indices, long, request, sinks, latent, mask.implementation)
            mask.record(module, AttentionChoice(name, request, crossing, words_of(keys)))
            scored, mask.scored = mask.scored, None
            if scored is not None and mask.index_losses is not None:
                mask.index_losses[id(module)] = index_loss(scored, q, k, keys)
            return selected_attention(q, k, v, keys)
        mask.record(module, AttentionChoice(name, request, crossing))
        return run(name, request, q, k, v, packed, sinks=sinks, alibi_slopes=alibi_slopes)

    if mask.over_ranks:
        _refuse_across_ranks(module, causal=causal, dropout=dropout)
    if mask.context is None:
        out = attend(q, k, v, packed, s_aux, NOT_CROSSED if mask.over_ranks else None)
    else:
        out = _across_ranks(q, k, v, mask, attend, sliding_window, s_aux)
    return out.view(rows, length, heads, -1), None


def _of_tower(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: PackedMetadata,
    asked: set[AttentionRequest] | None = None,
    **options: Any,
) -> Tensor:
    """Attention of all images [1, H, T, D] at once, each seeing itself alone; [1, T, H, D].

    The request is added to those that were ``asked``, without the sizes of its batch, for blocks compiled later.
    """
    q, k, v = (x[0].transpose(0, 1) for x in _same_dtype(query, key, value))
    request = request_of(q, k, v, segments, causal=False, **options)
    name, request = choose(request, segments)
    if asked is not None:
        asked.add(replace(request, tokens=0, segments=0, max_seqlen=0, host_lengths=False, requires_grad=False))
    return run(name, request, q, k, v, segments)[None]


@torch.compiler.disable  # each batch has other pieces, which a graph would be made of anew
def _across_ranks(
    q: Tensor, k: Tensor, v: Tensor, mask: PackedForward, attend: Any, window: int | None, sinks: Tensor | None
) -> Tensor:
    share = mask.context
    assert share is not None
    crossing = choose_method(share, q, k, v, window, mask.method)
    attend = partial(attend, crossing=crossing)
    return context_attention(q, k, v, share, attend, window=window, sinks=sinks, method=crossing.method)


def _refuse_across_ranks(module: nn.Module, *, causal: bool, dropout: float) -> None:
    """Raise, on all ranks alike and before they exchange anything, where attention over ranks would not be exact."""
    if dropout:
        raise UnsupportedModelError(
            f"{_where(module)} drops attention weights with probability {dropout:g}, and ranks would not draw what one "
            "process draws: set attention_dropout=0 in the config"
        )
    if not causal or _chunk(module) is not None:
        kind = "sees chunks of a document" if causal else "is not causal"
        raise UnsupportedModelError(
            f"{_where(module)} {kind}: its documents cannot be cut over ranks, patch it without mesh"
        )


def _where(module: nn.Module) -> str:
    return f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"


def _chunk(module: nn.Module) -> int | None:
    """The chunk inside which an attention layer of Llama 4 sees; its layers carry no argument for it, only a mask."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "attention_chunk_size", None) is None or _kind(module) != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


def kind_of(module: Any) -> str | None:
    """Returns the kind of an attention layer as its config lists it; None if it does not."""
    kinds, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[layer] if kinds and layer is not None else None


def _kind(module: nn.Module) -> str | None:
    """The kind of an attention layer, which a patch wrote there.

    By its number and the config it would be the same, but a compiled layer that reads its number shares its graph with
    no other one, and torch makes no more than eight.
    """
    kind: str | None = module.__dict__.get(KIND)
    return kind


def _sees_both_ways(module: nn.Module, mask: PackedForward) -> bool:
    """Returns whether the spans of a batch see each other both ways in a layer."""
    return mask.layers_of_spans is None or _kind(module) == mask.layers_of_spans


def _window_of_mask(module: nn.Module) -> int | None:
    """The window of a layer that only its mask limits (Qwen2-MoE, Phi-3.5-MoE); flash attention reads no mask."""
    config: Any = module.config
    if not hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask"):
        return None
    if (kind := _kind(module)) is not None and kind != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _same_dtype(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The dtype that torch's attention would take: autocast's, else the value's where q or k were left in float32."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return [x if x.dtype == dtype else x.to(dtype) for x in (query, key, value)]
