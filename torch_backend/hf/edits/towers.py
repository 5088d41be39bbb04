"""Vision towers that know where images end, in one call of packed attention for all images of a step.

Without flash-attention the towers of the Qwen and GLM families split queries, keys and values at ``cu_seqlens``, which
they read back from the device in every layer, and call attention once for each image, or for each window.

    a packed call -> a hook hands its PackedForward to the tower, which passes on what it does not know -> the attention
    layer is given one split of all patches, and the boundaries as segments -> the registered attention runs on them

Pixtral's tower puts all patches into one row, under a mask [T, T] that it fills image by image. In a packed call it
gets the images as segments, and makes no mask: it takes the branch that it has for flash-attention, by a config of that
name. Its forward has no argument for that, and a forward of our own would be a copy without its decorators.

A call that is not packed runs as before, and so does a tower that names an implementation with "flash" in it.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE
from torch_backend.hf.attention import TOWER_SEGMENTS, uses_interface
from torch_backend.hf.edits.kinds import AttentionName, Edit, Hook, LayerOverride
from torch_backend.hf.edits.override import original_class, override
from torch_backend.hf.forward import PackedForward
from torch_backend.segments import PackedMetadata

PACKED = "packed"  # the keyword under which towers pass the PackedForward on to their layers
_BOUNDARIES = "cu_seqlens"


def tower_edits(root: Any, hand_to_tower: Callable[..., Any]) -> Iterator[Edit]:
    """The edits of a model's vision tower; ``hand_to_tower`` is a forward pre-hook that passes the PackedForward on."""
    tower = tower_of(root)
    layers = [] if tower is None else list(tower_layers(tower))
    edits: list[Edit] = [LayerOverride(layer, override_tower_layer) for layer in layers]
    if tower is None and (tower := pixtral_of(root)) is not None:
        edits.append(LayerOverride(tower, override_pixtral))
    if "image_sizes" in EXACT_KEYS.get(root.config.model_type, ()):
        yield Hook(partial(root.base_model.register_forward_pre_hook, sizes_on_host, with_kwargs=True))
    if tower is not None:
        yield AttentionName(tower.config)
        yield from edits
        yield Hook(partial(tower.register_forward_pre_hook, hand_to_tower, with_kwargs=True))


def tower_of(root: Any) -> nn.Module | None:
    """Returns the vision tower of a model if its layers take boundaries and attention runs image by image."""
    tower = getattr(root.base_model, "visual", None)
    if root.config.model_type not in M_ROPE or tower is None or not list(tower_layers(tower)):
        return None
    return None if "flash" in (tower.config._attn_implementation or "") else tower


def pixtral_of(root: Any) -> nn.Module | None:
    """Returns the Pixtral tower of a model if it runs under a mask of all its patches."""
    towers = (
        x for x in root.base_model.children() if getattr(getattr(x, "config", None), "model_type", "") == "pixtral"
    )
    tower: Any = next(towers, None)
    return None if tower is None or "flash" in (tower.config._attn_implementation or "") else tower


def override_pixtral(tower: nn.Module) -> None:
    """Make a Pixtral tower attend to all images of a packed call at once, without a mask."""
    override(tower, _without_mask)


def sizes_on_host(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: reads the sizes of images from the device once, where the model reads them one by one."""
    sizes = kwargs.get("image_sizes")
    return args, {**kwargs, "image_sizes": sizes.cpu()} if isinstance(sizes, Tensor) else kwargs


_config_of_tower = threading.RLock()  # a call reads the config of the tower that another thread may have exchanged


def _without_mask(
    tower: Any, call: Callable[..., Any], pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any
) -> Any:
    forward = kwargs.pop(PACKED, None)
    if torch.compiler.is_compiling():
        return call(pixel_values, image_sizes=image_sizes, **kwargs)
    with _config_of_tower:
        if not isinstance(forward, PackedForward):
            return call(pixel_values, image_sizes=image_sizes, **kwargs)
        sizes = [pixel_values.shape[-2:]] * len(pixel_values) if image_sizes is None else image_sizes.tolist()
        lengths = [(height // tower.patch_size) * (width // tower.patch_size) for height, width in sizes]
        kwargs[TOWER_SEGMENTS] = PackedMetadata.from_lengths(lengths, device=pixel_values.device)
        with _as_for_flash_attention(tower):
            return call(pixel_values, image_sizes=sizes, **kwargs)


@contextmanager
def _as_for_flash_attention(tower: Any) -> Iterator[None]:
    """Inside, the tower's own config names flash-attention, and that of its layers does not."""
    own = tower.config
    tower.config = copy.copy(own)
    tower.config._attn_implementation = "flash_attention_2"
    try:
        yield
    finally:
        tower.config = own


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
