"""Facts about encoders, whose tokens see each other in both directions.

Their attention gets the segments as a decoder's does, and is not causal inside them. Those that have attention of their
own run on batches of documents of one length. Some number their tokens from the padding token on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import CapacityError
from torch_backend.hf.anatomy.heads import Head
from torch_backend.hf.override import forward_names
from torch_backend.segments import PackedMetadata, to_device

# what modeling files call a table of learned positions
_TABLES = {"position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe"}
_TABLE_OF_ANGLES = "max_positions"  # the attribute of layers of GPT-J and CodeGen that says how many rows theirs has
_NUMBERED = "create_position_ids_from_input_ids"  # what modeling files call RoBERTa's rule

Numbering = Callable[[Tensor | None, PackedMetadata], Tensor]


def is_encoder(config: Any, head: Head) -> bool:
    """Returns whether a model without a language-model head is of a family that has no causal decoder of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return head != "next token" and (not known or "is_decoder" in config.to_dict())


def takes_positions(model: nn.Module) -> bool:
    """Returns whether a model takes positions, so that they can restart at every document."""
    return "position_ids" in forward_names(model) or not _is_encoder_class(model)


def sees_both_sides(head: Head, layers: Iterable[nn.Module]) -> str | None:
    """Explains why attention layers do not fit a head; None if they do."""
    if head == "next token" and any(getattr(layer, "is_causal", True) is False for layer in layers):
        return "its attention is not causal, and its head predicts the next token"
    return None


def numbering(model: nn.Module) -> Numbering | None:
    """Returns the rule by which a model numbers tokens, if it is RoBERTa's; None if it counts from 0."""
    for module in (model, *model.children()):
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and (
            hasattr(module, _NUMBERED) or hasattr(sys.modules.get(type(module).__module__), _NUMBERED)
        ):
            return PaddingOffset(padding)
    return None


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


def position_table(model: nn.Module) -> range | None:
    """Returns the positions that a model has learned vectors for, those of documents' tokens; None without a table."""
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _TABLES:
            numbered = numbering(model)
            first = numbered.padding + 1 if isinstance(numbered, PaddingOffset) else 0
            return range(first, table.num_embeddings - getattr(table, "offset", 0))
        if isinstance(rows := getattr(table, _TABLE_OF_ANGLES, None), int):
            return range(rows)
    return None


def check_lengths(packed: PackedMetadata, position_ids: Tensor, positions: range | None, model: str) -> None:
    """Check that every document has a learned position for each token. Positions are read for long segments alone.

    Args:
        packed: the segments; a long one may be padding, so it proves nothing by itself.
        position_ids: of all tokens.
        positions: those that the ``model`` has, see :func:`position_table`.

    Raises:
        CapacityError: a document is longer.
    """
    if positions is None or packed.max_seqlen <= len(positions) or not packed.readable:
        return
    if packed.lengths is not None and max(packed.lengths) <= len(positions):
        return
    if (last := int(position_ids.max())) >= positions.stop:
        raise CapacityError(
            f"a document has {last + 1 - positions.start:,} tokens and {model} learned positions for "
            f"{len(positions):,}: cut documents when they are tokenised, or pack with capacity={len(positions)} and "
            'overflow="split", "truncate" or "drop"',
            option="overflow capacity",
        )


def _is_encoder_class(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", True) is False for module in model.modules())
