"""The latent vectors of latent attention beside its keys, so that attention over selected keys can use them.

``expand_kv`` of a modeling file makes the keys and values of all heads of one latent vector for each token. Its keys
carry that vector from here to the attention function, as an attribute that goes when they go; recomputed layers make it
again. Compiled layers make them outside of their graphs, and only where a batch selects keys (:data:`SELECTING`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.anatomy.unchanged import has_hooks
from torch_backend.hf.edits.override import Attribute
from torch_backend.ops.attention.selected import Latent

# Whether the packed forward that runs selects keys. Graphs are guarded on it; no result depends on it.
SELECTING = SimpleNamespace(active=False)
_EXPAND, _MADE_OF = "expand_kv", "_crosspack_made_of"


def latent_edits(layers: Iterable[nn.Module]) -> Iterator[Attribute]:
    """The edits of layers that expand latent vectors by a method that nobody has replaced: their keys carry them."""
    for layer in layers:
        if hasattr(type(layer), _EXPAND) and _EXPAND not in layer.__dict__:
            yield Attribute(layer, _EXPAND, partial(_expand, layer))


def _expand(layer: Any, compressed: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() and not SELECTING.active:
        expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, compressed, rotated)
        return expanded
    return _carrying(layer, compressed, rotated)


@torch.compiler.disable
def _carrying(layer: Any, compressed: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(layer).expand_kv(layer, compressed, rotated)
    setattr(keys, _MADE_OF, (compressed, rotated))
    return keys, values


def latent_of(layer: Any, keys: Tensor) -> Latent | None:
    """Returns the operands that the keys [B, H, S, D] of a layer were made of; None if they carry none.

    None also if their projection is not a plain one: adapters, quantized and sharded weights, hooks.
    """
    made_of = getattr(keys, _MADE_OF, None)
    if made_of is None:
        return None
    projection = layer.kv_b_proj
    plain = type(projection) is nn.Linear and projection.bias is None and "forward" not in projection.__dict__
    if not plain or has_hooks(projection) or type(projection.weight) not in (Tensor, nn.Parameter):
        return None
    compressed, rotated = (x.flatten(0, 2) for x in made_of)
    return Latent(compressed, rotated, projection.weight)
