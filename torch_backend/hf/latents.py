"""The latent vectors of latent attention beside its keys, so that attention over selected keys can use them.

``expand_kv`` of a modeling file makes the keys and values of all heads of one latent vector for each token. Its keys
carry that vector from here to the attention function, as an attribute that goes when they go; recomputed layers make it
again. Compiled layers run no selected keys, and carry nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.anatomy.additions import has_hooks
from torch_backend.hf.override import Attribute
from torch_backend.ops.attention.selected import Latent

_EXPAND, _MADE_OF = "expand_kv", "_crosspack_made_of"


def latent_edits(layers: Iterable[nn.Module]) -> Iterator[Attribute]:
    """The edits of layers that expand latent vectors by a method that nobody has replaced: their keys carry them."""
    for layer in layers:
        if hasattr(type(layer), _EXPAND) and _EXPAND not in layer.__dict__:
            yield Attribute(layer, _EXPAND, partial(_expand, layer))


def _expand(layer: Any, compressed: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = type(layer).expand_kv(layer, compressed, rotated)
    if not torch.compiler.is_compiling():
        setattr(keys, _MADE_OF, (compressed, rotated))
    return keys, values


def latent_of(layer: Any, keys: Tensor) -> Latent | None:
    """Returns the operands that the keys [B, H, S, D] of a layer were made of; None if they carry none.

    None also if their projection is not a plain one: adapters, quantized and sharded weights, hooks.
    """
    made_of = None if torch.compiler.is_compiling() else getattr(keys, _MADE_OF, None)
    if made_of is None:
        return None
    projection = layer.kv_b_proj
    plain = type(projection) is nn.Linear and projection.bias is None and "forward" not in projection.__dict__
    if not plain or has_hooks(projection) or type(projection.weight) not in (Tensor, nn.Parameter):
        return None
    compressed, rotated = (x.flatten(0, 2) for x in made_of)
    return Latent(compressed, rotated, projection.weight)
