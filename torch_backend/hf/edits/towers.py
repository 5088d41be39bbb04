"""Vision towers that know where images end, in one call of packed attention for all images of a step.

Without flash-attention the towers of the Qwen and GLM families split queries, keys and values at ``cu_seqlens``, which
they read back from the device in every layer, and call attention once for each image, or for each window.

    a packed call -> a hook hands its PackedForward to the tower, which passes on what it does not know -> the attention
    layer is given one split of all patches, and the boundaries as segments -> the registered attention runs on them

A call that is not packed runs as before, and so does a tower that names an implementation with "flash" in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.anatomy.families import M_ROPE
from torch_backend.hf.attention import TOWER_SEGMENTS, uses_interface
from torch_backend.hf.edits.override import original_class, override
from torch_backend.hf.forward import PackedForward
from torch_backend.segments import PackedMetadata

PACKED = "packed"  # the keyword under which towers pass the PackedForward on to their layers
_BOUNDARIES = "cu_seqlens"


def tower_of(root: Any) -> nn.Module | None:
    """Returns the vision tower of a model if its layers take boundaries and attention runs image by image."""
    tower = getattr(root.base_model, "visual", None)
    if root.config.model_type not in M_ROPE or tower is None or not list(tower_layers(tower)):
        return None
    return None if "flash" in (tower.config._attn_implementation or "") else tower


def tower_layers(tower: nn.Module) -> Iterator[nn.Module]:
    """The attention layers of a tower that take boundaries and call transformers' attention interface."""
    for module in tower.modules():
        kind = original_class(module)
        if uses_interface(kind) and _BOUNDARIES in inspect.signature(kind.forward).parameters:
            yield module


def override_tower_layer(layer: nn.Module) -> None:
    """Make an attention layer of a tower run all images of a packed call at once."""
    override(layer, _attend_at_once)


def _attend_at_once(layer: nn.Module, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    forward = kwargs.pop(PACKED, None)
    boundaries = kwargs.get(_BOUNDARIES)
    if not isinstance(forward, PackedForward) or boundaries is None:
        return call(hidden, *args, **kwargs)
    patches = hidden.shape[0]
    kwargs[_BOUNDARIES] = torch.tensor([0, patches])  # on the host: the layer reads it back
    kwargs[TOWER_SEGMENTS] = _segments(forward, boundaries, patches, hidden.device)
    return call(hidden, *args, **kwargs)


def _segments(forward: PackedForward, boundaries: Tensor, patches: int, device: torch.device) -> PackedMetadata:
    """The images or windows as segments, made once for the layers that share their boundaries."""
    known = forward.towers.get(id(boundaries))
    if known is None:
        made = PackedMetadata.from_boundaries(boundaries, rows=1, row_length=patches, max_seqlen=patches, device=device)
        known = forward.towers[id(boundaries)] = boundaries, made  # the tensor is kept, and with it its id
    return known[1]
