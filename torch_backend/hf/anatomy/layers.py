"""Finds the layers of a model that packing edits, by kind: attention, state along the row, indexers, experts, rotary.

Nothing here changes a model. The files of :mod:`torch_backend.hf.edits` change the layers that are found here, so a
patch enters the file of a kind only for a model that has such layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.families import (
    ATTENTION_METHOD,
    INDEXERS,
    INTERFACE,
    OWN_FORWARDS,
    OWN_METHODS,
    PASS_ON,
    STATEFUL_LAYERS,
)
from torch_backend.hf.override import has_own_forward, names, original_class

# what transformers' use_experts_implementation leaves on a module
MARKS_OF_EXPERTS = ("has_gate", "has_bias", "is_transposed")


# -- attention ---------------------------------------------------------------------------------------------------------


def uses_interface(layer_class: type[nn.Module]) -> bool:
    """Returns whether layers of the class call transformers' attention interface."""
    return INTERFACE in names(layer_class.forward)


def passes_segments(decoder: nn.Module) -> bool:
    """Returns whether a decoder passes the segments on where its mask would be, as those of transformers 5.0 do not."""
    kind = original_class(decoder)
    return "create_causal_mask" in names(kind.forward) or kind.__name__ == "OpenAIGPTModel"


def computes_attention(layer: nn.Module) -> bool:
    """Returns whether a layer computes attention itself, by code that is known and that nobody has replaced.

    Its class may be one of FSDP's around the known one.
    """
    kind = original_class(layer)
    forward = definer(kind, "forward")
    module = forward.__module__
    in_method = hasattr(kind, ATTENTION_METHOD)
    is_known = forward.__name__ in (OWN_METHODS if in_method else OWN_FORWARDS)
    is_written = module.startswith("transformers.models.") and getattr(forward.forward, "__module__", None) == module
    is_kept = definer(kind, ATTENTION_METHOD) is forward if in_method else not has_own_forward(layer)
    return is_known and is_written and is_kept and not _needs_its_own_code(layer)


def _needs_its_own_code(layer: Any) -> bool:
    """Returns whether a layer is Falcon's with ALiBi, which rounds positions, or Bloom's that splits its output."""
    alibi = getattr(getattr(layer, "config", None), "alibi", False)
    return bool(alibi or (getattr(layer, "slow_but_exact", False) and layer.pretraining_tp > 1))


def definer(kind: type[nn.Module], name: str) -> type[Any]:
    """The class that defines a method of a layer's class."""
    return next(base for base in kind.__mro__ if name in base.__dict__)


# -- layers that carry state along the row -----------------------------------------------------------------------------


def find_mixers(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The layers inside ``module`` that carry state along the row, by name, the outermost ones only.

    They have a convolution of their own, or are known by the name of their class.
    """
    mixers = {}
    for name, child in module.named_children():
        convolves = any(isinstance(inner, nn.Conv1d) for inner in child.children())
        # by the names of all base classes, because FSDP renames the class
        stateful = any(STATEFUL_LAYERS[c.__name__](child) for c in type(child).__mro__ if c.__name__ in STATEFUL_LAYERS)
        if convolves or stateful:
            mixers[prefix + name] = child
        else:
            mixers |= find_mixers(child, f"{prefix}{name}.")
    return mixers


def passes_on(layer: nn.Module) -> str | None:
    """The argument of a decoder layer that alone brings segments to its mixer or indexer; None if others do."""
    return next((PASS_ON[c.__name__] for c in type(layer).__mro__ if c.__name__ in PASS_ON), None)


# -- indexers ----------------------------------------------------------------------------------------------------------


def find_indexers(decoder: nn.Module) -> list[nn.Module]:
    """The indexers inside a decoder, known by the names of their classes."""
    return [module for module in decoder.modules() if selects(module)]


def selects(module: nn.Module) -> str | None:
    """Says what a module selects; None if it is no indexer. By the names of all base classes, as FSDP renames it."""
    return next((INDEXERS[c.__name__] for c in type(module).__mro__ if c.__name__ in INDEXERS), None)


def budget_of(indexer: Any) -> int:
    """The length up to which a document selects all of its keys."""
    match selects(indexer):
        case "tokens":
            return int(indexer.index_topk)
        case "blocks":
            return int(indexer.topk_blocks * indexer.block_size)
    return int((indexer.block_topk + 1) * indexer.compress_ratio - 1)  # a query also sees the block that it stands in


def block_of(indexer: Any) -> int:
    """The keys that an indexer selects together."""
    match selects(indexer):
        case "tokens":
            return 1
        case "blocks":
            return int(indexer.block_size)
    return int(indexer.compress_ratio)


# -- experts and rotary modules ----------------------------------------------------------------------------------------


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of fused experts inside a model, by name."""
    return {name: m for name, m in model.named_modules() if all(mark in m.__dict__ for mark in MARKS_OF_EXPERTS)}


def find_batch_dependent(decoder: nn.Module) -> dict[str, nn.Module]:
    """Rotary modules of ``decoder`` whose frequencies depend on the batch, by name.

    Raises:
        UnsupportedModelError: one of them sits inside a layer, where gradient checkpointing would run it again without
            its segments.
    """
    rotaries = {name: module for name, module in decoder.named_modules() if _depends_on_batch(module)}
    inside = [name for name in rotaries if any(part.isdigit() for part in name.split("."))]
    if inside:
        raise UnsupportedModelError(
            f"{inside[0]} chooses its rotary frequencies from the longest position in the batch inside a layer: "
            "use rotary frequencies of a fixed kind (default, linear, yarn, llama3)"
        )
    return rotaries


def _depends_on_batch(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)
