"""Locates the parts of a model that packing edits: decoder, layers of each kind and head, its route and its positions.

A transformers model -> :func:`anatomy_of` -> an :class:`Anatomy`, or the reason why the model cannot be made exact. The
model is not changed. A patch and an audit begin with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.families import MASK_PADDING, SEE_PADDING, BothWays, Route, both_ways_of, route_of
from torch_backend.hf.anatomy.heads import Head, head_of
from torch_backend.hf.anatomy.layers import (
    budget_of,
    computes_attention,
    find_batch_dependent,
    find_experts,
    find_indexers,
    find_mixers,
    passes_segments,
    uses_interface,
)
from torch_backend.hf.anatomy.structure import decoder_of, own_modules, why_not_adapters
from torch_backend.hf.override import forward_names, original_class
from torch_backend.ops.document_batches import FINE, OWN
from torch_backend.segments import PackedMetadata, to_device

# what modeling files call a table of learned positions
_TABLES = {"position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe"}
_TABLE_OF_ANGLES = "max_positions"  # the attribute of layers of GPT-J and CodeGen that says how many rows theirs has
_NUMBERED = "create_position_ids_from_input_ids"  # what modeling files call RoBERTa's rule


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model.

    Attributes:
        root: the outermost transformers model.
        decoder: the model inside it that makes the attention masks.
        head: what it predicts.
        route, why: how segments travel in it and the reason, see :mod:`.families`.
        attention: the layers that run packed attention, by name.
        own: those of them that compute it themselves, without transformers' interface.
        mixers: the layers that carry state, by name.
        experts: the modules of fused experts, by name.
        indexers: the modules that select keys for attention.
        budget: the length up to which a document selects all of its keys in every layer; None where nothing selects.
        rotaries: rotary modules whose frequencies depend on the batch, by name.
        both_ways: tokens that see each other in both directions; None if attention is causal throughout.
        numbering: counts positions as the decoder itself does; None if it takes them.
        positions: those that it has learned vectors for; None without a table.
        sizes: which documents run in one batch where a part runs per document.
    """

    root: Any
    decoder: Any
    head: Head
    route: Route
    why: str
    attention: Mapping[str, nn.Module]
    own: Mapping[str, nn.Module]
    mixers: Mapping[str, nn.Module]
    experts: Mapping[str, nn.Module]
    indexers: tuple[nn.Module, ...]
    budget: int | None
    rotaries: Mapping[str, nn.Module]
    both_ways: BothWays | None
    numbering: PaddingOffset | None
    positions: range | None
    sizes: int

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Everything that must receive the segments, by name."""
        return {**self.attention, **self.mixers}

    @property
    def numbers_tokens(self) -> bool:
        """Returns whether the model numbers the tokens of every document itself, ignoring positions in the batch."""
        return self.route == "documents" or self.numbering is not None

    @property
    def takes_axes(self) -> bool:
        """Returns whether positions may have several axes, [3, B, S]."""
        rope: Mapping[str, Any] = getattr(self.decoder.config, "rope_parameters", None) or {}
        return self.route != "documents" and not self.rotaries and "mrope_section" in rope  # M-RoPE


def anatomy_of(root: Any) -> Anatomy:
    """Locate the parts of a transformers model.

    Raises:
        UnsupportedModelError: the model, or its head, cannot be made exact.
    """
    decoder = decoder_of(root)
    inside = dict(own_modules(decoder))
    own = {name: m for name, m in inside.items() if computes_attention(m)} if passes_segments(decoder) else {}
    attention = {name: m for name, m in inside.items() if name in own or uses_interface(original_class(m))}
    mixers = {name: m for name, m in find_mixers(decoder).items() if name in inside}
    rotaries = find_batch_dependent(decoder)
    indexers, experts = tuple(find_indexers(decoder)), find_experts(decoder)
    configs = root.config, decoder.config
    head = head_of(root)
    takes_positions = "position_ids" in forward_names(decoder) or not _sees_both_sides(decoder.modules())
    route, why = route_of(*configs, head=head, takes_segments=bool(attention or mixers) and takes_positions)
    if route == "documents" and decoder is root and head == "next token":
        raise UnsupportedModelError(
            f"{type(root).__name__} embeds tokens and makes logits and loss in one forward, which would run on batches "
            "of documents and lose the loss: put its layers into a PreTrainedModel of their own inside it"
        )
    reason = why_not_adapters(root, decoder)
    # the layers of a prefix-LM say that they are not causal, and leave it to the mask above them
    both_ways = both_ways_of(root.config)
    is_prefix = both_ways is not None and both_ways.prefix
    if reason is None and head == "next token" and not is_prefix and _sees_both_sides(attention.values()):
        reason = "its attention is not causal, and its head predicts the next token"
    if reason is not None:
        raise UnsupportedModelError(f"{type(root).__name__} cannot be trained packed, because {reason}")
    needs_own_sizes = bool({config.model_type for config in configs} & set(SEE_PADDING))
    if route == "documents":
        sees_all = is_encoder(root.config, head) and decoder.config.model_type not in MASK_PADDING
        needs_own_sizes = bool(needs_own_sizes or rotaries or sees_all)
        attention, own, mixers, experts, indexers, rotaries = {}, {}, {"the decoder": decoder}, {}, (), {}
    numbering = _numbering(decoder)
    return Anatomy(
        root=root,
        decoder=decoder,
        head=head,
        route=route,
        why=why,
        attention=attention,
        own=own,
        mixers=mixers,
        experts=experts,
        indexers=indexers,
        budget=min(map(budget_of, indexers), default=None),
        rotaries=rotaries,
        both_ways=both_ways,
        numbering=numbering,
        positions=next(_position_tables(decoder, 0 if numbering is None else numbering.padding + 1), None),
        sizes=OWN if needs_own_sizes else FINE,
    )


def is_encoder(config: Any, head: Head) -> bool:
    """Returns whether a model without a language-model head is of a family that has no causal decoder of its own.

    The tokens of an encoder see each other in both directions. Its attention gets the segments as a decoder's does, and
    is not causal inside them.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    may_be_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return head != "next token" and (not may_be_causal or "is_decoder" in config.to_dict())


def _sees_both_sides(modules: Iterable[nn.Module]) -> bool:
    return any(getattr(module, "is_causal", True) is False for module in modules)


# -- positions ---------------------------------------------------------------------------------------------------------


class PaddingOffset:
    """RoBERTa's positions: ``padding + 1, padding + 2, ...`` in each document; padding tokens are at ``padding``.

    As fairseq's ``make_positions`` has them: tokens that are padding inside a document are not counted.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, input_ids: Tensor | None, segments: PackedMetadata) -> Tensor:
        """int64 [T]; embedded tokens are all counted."""
        if input_ids is None:
            return segments.position_ids + (self.padding + 1)
        counted = (to_device(input_ids, segments.device).flatten() != self.padding).long()
        total = counted.cumsum(0)
        before = torch.cat((total.new_zeros(1), total)).index_select(0, segments.cu_seqlens)
        return (total - before.index_select(0, segments.seq_idx)) * counted + self.padding


def _numbering(model: nn.Module) -> PaddingOffset | None:
    """Returns the rule by which a model numbers tokens, if it is RoBERTa's; None if it counts from 0."""
    paddings = (
        padding
        for module in (model, *model.children())
        if isinstance(padding := getattr(module, "padding_idx", None), int)
        and (hasattr(module, _NUMBERED) or hasattr(sys.modules.get(type(module).__module__), _NUMBERED))
    )
    return next(map(PaddingOffset, paddings), None)


def _position_tables(model: nn.Module, first: int) -> Iterator[range]:
    """Yields the positions of a model's tables of learned vectors; ``first`` is that of a document's first token."""
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _TABLES:
            yield range(first, table.num_embeddings - getattr(table, "offset", 0))
        elif isinstance(rows := getattr(table, _TABLE_OF_ANGLES, None), int):
            yield range(rows)
