"""Vision towers that know where images end, in one call of packed attention for all images of a step.

Without flash-attention the towers of the Qwen and GLM families split queries, keys and values at ``cu_seqlens``, which
they read back from the device in every layer, and call attention once for each image, or for each window.

    a packed call -> a hook hands its PackedForward to the tower -> the tower makes positions and boundaries from grids
    on the host (:class:`TowerCall`), which it passes on with what it does not know -> the attention layer attends to
    all patches at once, inside the segments between these boundaries -> the registered attention runs on them

The attention layer takes the branch that it has for flash-attention, in a copy of its forward that asks for it. Layers
of older versions without a name for that question get one split of all patches instead.

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
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE
from torch_backend.hf.anatomy.layers import uses_interface
from torch_backend.hf.anatomy.structure import with_values
from torch_backend.hf.anatomy.vision import GRIDS
from torch_backend.hf.attention import PACKED, TOWER_SEGMENTS, AttentionName
from torch_backend.hf.edits.grids import of_grids
from torch_backend.hf.edits.patches import override_rotation_of_patches, product_edits
from torch_backend.hf.entry import Hook
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.override import Edit, LayerOverride, called, has_own_forward, original_class, rebound
from torch_backend.segments import PackedMetadata, to_device

BOUNDARIES = "cu_seqlens"
CALL = "crosspack_call"  # the attribute of boundaries that holds the TowerCall, where a tower passes nothing else on
_FROM_HOST, AT_ONCE = "_crosspack_from_host", "_crosspack_at_once"  # copies of a tower's and of a layer's forward
_ASKS_FOR_FLASH = "is_flash_attention_requested"


def tower_edits(root: Any) -> Iterator[Edit]:
    """The edits of a model's vision tower."""
    edits: list[Edit] = []
    names = {"image_sizes"} & set(EXACT_KEYS.get(root.config.model_type, ()))
    if (tower := tower_of(root)) is not None:
        names |= set(GRIDS.values())
        edits += [LayerOverride(layer, attend_at_once, layer_attributes) for layer in tower_layers(tower)]
        edits += [LayerOverride(tower, _from_host, _tower_attributes), *product_edits(tower)]
    elif (tower := pixtral_of(root)) is not None:
        edits.append(LayerOverride(tower, _without_mask))
    if names:
        on_host = partial(sizes_on_host, frozenset(names))
        yield Hook(root.base_model.register_forward_pre_hook, on_host, with_kwargs=True)
    if tower is not None:
        yield AttentionName(tower.config)
        yield from edits
        yield Hook(tower.register_forward_pre_hook, _hand_to_tower, with_kwargs=True)


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


def sizes_on_host(
    names: frozenset[str], forward: PackedForward, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook: has the sizes of images on the host, where the model reads them one by one.

    Batches of our collators carry them there; of others they are read from the device, once.
    """
    known = forward.image_sizes
    given = {name: x for name, x in kwargs.items() if name in names and isinstance(x, Tensor)}
    carried = {name for name, x in given.items() if name in known and known[name].shape == x.shape}
    return args, {**kwargs, **{name: known[name] if name in carried else x.cpu() for name, x in given.items()}}


def _hand_to_tower(
    forward: PackedForward, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, PACKED: forward}


_config_of_tower = threading.RLock()  # a call reads the config of the tower that another thread may have exchanged


def _without_mask(
    tower: Any, call: Callable[..., Any], pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any
) -> Any:
    """The call of a Pixtral tower, which attends to all images of a packed call at once."""
    forward = kwargs.pop(PACKED, None)
    if torch.compiler.is_compiling():
        return call(pixel_values, image_sizes=image_sizes, **kwargs)
    with _config_of_tower:
        if not isinstance(forward, PackedForward):
            return call(pixel_values, image_sizes=image_sizes, **kwargs)
        sizes = [pixel_values.shape[-2:]] * len(pixel_values) if image_sizes is None else image_sizes.tolist()
        lengths = [(height // tower.patch_size) * (width // tower.patch_size) for height, width in sizes]
        kwargs[TOWER_SEGMENTS] = PackedMetadata.from_lengths(lengths, device=pixel_values.device)
        config = copy.copy(tower.config)  # the layers keep theirs, which names no flash-attention
        config._attn_implementation = "flash_attention_2"
        with with_values([(tower, "config", config)]):
            return call(pixel_values, image_sizes=sizes, **kwargs)


def tower_layers(tower: nn.Module) -> Iterator[nn.Module]:
    """The attention layers of a tower that take boundaries and call transformers' attention interface."""
    for module in tower.modules():
        kind = original_class(module)
        if uses_interface(kind) and BOUNDARIES in inspect.signature(kind.forward).parameters:
            yield module


class TowerCall:
    """One packed call of a tower that takes grids; its blocks receive it under the keyword ``packed``.

    A plain class, because wrappers of modules rebuild the dataclasses among their arguments.

    Attributes:
        kind: "vision" or "audio".
        forward: of the model.
        device: of the patches.
        grid: int64 [images, 3] on the device, and grid_on_host the same on the host.
        copies: tensors on the device by id, beside what they are copies of on the host.
        segments: of the patches, by the id of their boundaries, which are kept beside them.
        prepared: ids of the boundaries whose segments have what compiled blocks read.
    """

    kind = "vision"

    def __init__(self, forward: PackedForward, grid: Tensor, device: torch.device) -> None:
        self.forward = forward
        self.device = device
        self.grid_on_host = grid.cpu()
        self.grid = to_device(self.grid_on_host, device)
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.segments: dict[int, tuple[Tensor, PackedMetadata]] = {}
        self.prepared: set[int] = set()

    def to_device(self, x: Any) -> Any:
        """A result of a function that ran on the host."""
        if isinstance(x, tuple):
            return tuple(map(self.to_device, x))
        if not isinstance(x, Tensor) or x.device.type != "cpu":
            return x
        moved = to_device(x, self.device)
        self.copies[id(moved)] = moved, x
        return moved

    def segments_between(self, boundaries: Tensor, patches: int, device: torch.device) -> PackedMetadata:
        """The images or windows as segments, made once for the layers that share their boundaries."""
        known = self.segments.get(id(boundaries))
        if known is None:
            if (host := self.copies.get(id(boundaries))) is not None:
                made = PackedMetadata.from_lengths(host[1].diff().tolist(), device=device)
            else:
                made = PackedMetadata.from_boundaries(
                    boundaries, rows=1, row_length=patches, max_seqlen=patches, device=device
                )
            known = self.segments[id(boundaries)] = boundaries, made  # the tensor is kept, and with it its id
        return known[1].to(device)


def _tower_attributes(original: type[nn.Module]) -> dict[str, Any]:
    return {_FROM_HOST: _forward_from_host(original.forward)}


@cache
def _forward_from_host(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """``forward`` whose functions of grids run on the host; None where it calls none of them by name."""
    made = {name: partial(_on_host, value) for name, value in called(forward).items() if name.startswith("get_vision_")}
    return rebound(forward, made) if made else None


def _on_host(function: Callable[..., Any], grid: Any, *args: Any, **named: Any) -> Any:
    """Stands in for a function of transformers that takes grids and ``kwargs=``, the other arguments of the tower."""
    tower = (named.get("kwargs") or {}).get(PACKED)
    if not isinstance(tower, TowerCall):
        return function(grid, *args, **named)
    return tower.to_device(of_grids(function, tower.grid_on_host if grid is tower.grid else grid, *args, **named))


def _from_host(
    tower: nn.Module, call: Callable[..., Any], hidden: Tensor, *args: Any, grid_thw: Any = None, **kwargs: Any
) -> Any:
    """The call of a tower, which computes on the host what follows from grids alone."""
    forward = kwargs.pop(PACKED, None)
    if args:
        grid_thw, args = args[0], args[1:]
    if not isinstance(forward, PackedForward) or not isinstance(grid_thw, Tensor):
        return call(hidden, grid_thw, *args, **kwargs)
    made = TowerCall(forward, grid_thw, hidden.device)
    run = tower.__dict__[_FROM_HOST]
    call = call if run is None or has_own_forward(tower) else partial(run, tower)
    return call(hidden, made.grid, *args, **kwargs, **{PACKED: made})


def layer_attributes(original: type[nn.Module]) -> dict[str, Any]:
    return {AT_ONCE: _forward_at_once(original.forward)}


@cache
def _forward_at_once(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """``forward`` in its branch for flash-attention; None where it has none of that name."""
    known = called(forward)
    if _ASKS_FOR_FLASH not in known:
        return None
    return rebound(forward, {_ASKS_FOR_FLASH: _yes, **override_rotation_of_patches(known)})


def _yes(*_: Any) -> bool:
    return True


def compiles(layer: nn.Module) -> bool:
    """Returns whether an attention layer of a tower can be compiled: it reads no boundaries back."""
    return layer.__dict__.get(AT_ONCE) is not None and not has_own_forward(layer)


def attend_at_once(layer: nn.Module, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The call of an attention layer of a tower, of all images of a packed call at once."""
    if kwargs.get(TOWER_SEGMENTS) is None:  # outside of compiled blocks
        tower, boundaries = kwargs.get(PACKED), kwargs.get(BOUNDARIES)
        if not isinstance(tower, TowerCall) or boundaries is None:
            kwargs.pop(PACKED, None)
            return call(hidden, *args, **kwargs)
        kwargs[TOWER_SEGMENTS] = tower.segments_between(boundaries, hidden.shape[0], hidden.device)
    if compiles(layer):
        return layer.__dict__[AT_ONCE](layer, hidden, *args, **kwargs)
    kwargs[BOUNDARIES] = torch.tensor([0, hidden.shape[0]])  # on the host: the layer reads it back
    return call(hidden, *args, **kwargs)
