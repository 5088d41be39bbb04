"""Locates the parts of a model that packing edits: decoder, layers, mixers, rotary embeddings and head, and its route.

A transformers model -> :func:`anatomy_of` -> an :class:`Anatomy`, or the reason why the model cannot be made exact. The
model is not changed. A patch and an audit begin with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.encoders import (
    Numbering,
    is_encoder,
    numbering,
    position_table,
    sees_both_sides,
    takes_positions,
)
from torch_backend.hf.anatomy.families import MASK_PADDING, SEE_PADDING, Route, both_ways_of, route_of
from torch_backend.hf.anatomy.heads import Head, head_of
from torch_backend.hf.anatomy.structure import decoder_of, own_modules, why_not_adapters
from torch_backend.hf.attention import uses_interface
from torch_backend.hf.edits.indexers import budget_of, find_indexers
from torch_backend.hf.edits.mixers import find_mixers, why_not_on_the_row
from torch_backend.hf.edits.own_attention import computes_attention, passes_segments
from torch_backend.hf.edits.rotary import find_batch_dependent, has_position_axes
from torch_backend.hf.override import original_class
from torch_backend.ops.document_batches import FINE, OWN


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model.

    Attributes:
        root: the outermost transformers model.
        decoder: the model inside it that makes the attention masks.
        head: what it predicts.
        route, why: how segments travel in it and the reason, see :mod:`.families`.
        attention: the layers that run packed attention, by name.
        mixers: the layers that carry state, by name.
        indexers: the modules that select keys for attention.
        budget: the length up to which a document selects all of its keys in every layer; None where nothing selects.
        divided: the mixers that run per document, by name.
        rotaries: rotary modules whose frequencies depend on the batch, by name.
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
    mixers: Mapping[str, nn.Module]
    indexers: tuple[nn.Module, ...]
    budget: int | None
    divided: Mapping[str, nn.Module]
    rotaries: Mapping[str, nn.Module]
    numbering: Numbering | None
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
        return self.route != "documents" and not self.rotaries and has_position_axes(self.decoder.config)


def anatomy_of(root: Any) -> Anatomy:
    """Locate the parts of a transformers model.

    Raises:
        UnsupportedModelError: the model, or its head, cannot be made exact.
    """
    decoder = decoder_of(root)
    own = dict(own_modules(decoder))
    computes = computes_attention if passes_segments(decoder) else (lambda layer: False)
    attention = {name: m for name, m in own.items() if uses_interface(original_class(m)) or computes(m)}
    mixers = {name: m for name, m in find_mixers(decoder).items() if name in own}
    rotaries = find_batch_dependent(decoder)
    configs = root.config, decoder.config
    head = head_of(root)
    served = (attention or mixers) and takes_positions(decoder)
    route, why = route_of(*configs, head=head, uses_interface=bool(served))
    if route == "documents" and decoder is root and head == "next token":
        raise UnsupportedModelError(
            f"{type(root).__name__} embeds tokens and makes logits and loss in one forward, which would run on batches "
            "of documents and lose the loss: put its layers into a PreTrainedModel of their own inside it"
        )
    if (reason := why_not_adapters(root, decoder)) is not None:
        raise UnsupportedModelError(f"{type(root).__name__} cannot be trained packed, because {reason}")
    # the layers of a prefix-LM say that they are not causal, and leave it to the mask above them
    prefix = (both_ways := both_ways_of(root.config)) is not None and both_ways.prefix
    if not prefix and (reason := sees_both_sides(head, attention.values())) is not None:
        raise UnsupportedModelError(f"{type(root).__name__} cannot be trained packed, because {reason}")
    see_padding = {config.model_type for config in configs} & set(SEE_PADDING)
    if route == "documents":
        sees_all = is_encoder(root.config, head) and decoder.config.model_type not in MASK_PADDING
        sizes = OWN if see_padding or rotaries or sees_all else FINE
        attention, mixers, rotaries = {}, {"the decoder": decoder}, {}
    else:
        sizes = OWN if see_padding else FINE
    indexers = () if route == "documents" else tuple(find_indexers(decoder))
    return Anatomy(
        root=root,
        decoder=decoder,
        head=head,
        route=route,
        why=why,
        attention=attention,
        mixers=mixers,
        indexers=indexers,
        budget=min(map(budget_of, indexers), default=None),
        divided={n: m for n, m in mixers.items() if route == "documents" or why_not_on_the_row(m)},
        rotaries=rotaries,
        numbering=numbering(decoder),
        positions=position_table(decoder),
        sizes=sizes,
    )
