"""Runs the tower on a blank image or clip in calls whose batch has none, where something waits for the tower.

    a batch without images -> the embedding of its tokens -> a forward hook runs the tower on one blank image, or clip,
    and ties its features to the embeddings, which keep their values -> every parameter of the tower has a gradient, 0

DDP waits for the gradient of every parameter on every rank, FSDP for every rank in each collective of the tower. The
hook is at the embedding, because models embed their tokens first: ranks with and without images then gather sharded
weights in one order. In a process of its own the tower runs only where nothing else is trained, since the loss would
have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from torch_backend.hf.anatomy.audio import FEATURES, Audio, audio_of
from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE, PIXELS, ROWS_OF_IMAGES, media_keys
from torch_backend.hf.edits.clips import clip_edits, encode_clips
from torch_backend.hf.edits.towers import tower_edits
from torch_backend.hf.entry import Hook
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.override import Edit

_SILENCE = 8  # frames of a blank clip
_FEATURES = ("pooler_output", "deepstack_features")  # of what a tower returns, those that models put among the tokens


def takes_media(config: Any) -> bool:
    """Returns whether a model takes images or audio packed."""
    return bool(media_keys(config))


def media_edits(root: Any) -> Iterator[Edit]:
    """The edits of a model that takes images or audio: of its towers, and of its embedding for blank ones."""
    yield Hook(root.get_input_embeddings().register_forward_hook, partial(tie_blank_image, root))
    yield from tower_edits(root)
    yield from clip_edits(root)


def absent_media(config: Any, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns which of ``image`` and ``audio`` a model takes packed and a batch does not have."""
    keys = EXACT_KEYS.get(config.model_type, frozenset())
    kinds = {"image": PIXELS, "audio": (FEATURES,)}
    absent = {kind for kind, names in kinds.items() if all(kwargs.get(name) is None for name in names)}
    return tuple(kind for kind, names in kinds.items() if names[0] in keys and kind in absent)


def blank_media(root: Any, decoder: nn.Module, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the kinds of media of which a packed call has to run the tower although its batch has none."""
    if not (absent := absent_media(root.config, kwargs)):
        return ()
    tower = list(_tower(root, decoder))
    trained = torch.is_grad_enabled() and any(p.requires_grad for m in tower for p in m.parameters(recurse=False))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in tower)
        return absent if trained or sharded else ()
    text = (decoder, root.get_input_embeddings(), root.get_output_embeddings())
    text_trained = any(p.requires_grad for module in text if module is not None for p in module.parameters())
    return absent if trained and not text_trained else ()


def tie_blank_image(root: Any, forward: PackedForward, embedding: nn.Module, args: Any, embeddings: Tensor) -> Tensor:
    """A hook: runs the tower on a blank image, if a call waits for one, and ties its gradients to the embeddings."""
    absent, forward.blank = forward.blank, ()  # some models embed tokens more than once
    features: list[Tensor] = []
    if "audio" in absent and (audio := audio_of(root.config)) is not None:
        clip = blank_clip(audio, root.base_model.audio_tower)
        features.append(encode_clips(audio, root.base_model, forward, *clip))
    if "image" in absent:
        model = root if hasattr(root, "get_image_features") else root.base_model
        output = model.get_image_features(**blank_image(root))
        used = {name: output[name] for name in _FEATURES if name in output} if isinstance(output, Mapping) else output
        features += _tensors(used)
    features = [x for x in features if x.requires_grad]
    tied: Tensor = _Tied.apply(embeddings, *features) if features else embeddings
    return tied


class _Tied(torch.autograd.Function):
    """Its first argument, unchanged; the gradients of the others are 0, whatever their values are."""

    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> Tensor:
        x, *others = arguments
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.shapes)


def blank_clip(audio: Audio, tower: Any) -> tuple[Tensor, Tensor | None]:
    """The features [1, bins, frames] of a short silence, and their mask."""
    width = audio.width or max(audio.multiple, _SILENCE)
    features = torch.zeros(1, tower.config.num_mel_bins, width, device=next(tower.parameters()).device)
    return features, None if audio.mask is None else (torch.arange(width, device=features.device) < _SILENCE)[
        None
    ].long()


def blank_image(root: Any) -> dict[str, Tensor]:
    """The tensors of the smallest image that a family's tower takes, of ones, on its device and in its dtype."""
    config, vision = root.config, root.config.vision_config
    family = config.model_type
    weight = next(p for name, p in root.named_parameters() if "vi" in name)
    patch: Any = getattr(vision, "patch_size", None)

    dtype = weight.dtype if weight.is_floating_point() else torch.float32  # not that of quantized weights

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=weight.device)

    def sizes(*numbers: int) -> Tensor:
        return torch.tensor([numbers], device=weight.device)

    channels: Any = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    if family in M_ROPE:
        merge = vision.spatial_merge_size
        width = channels * vision.temporal_patch_size * patch**2
        return {"pixel_values": ones(merge**2, width), "image_grid_thw": sizes(1, merge, merge)}
    if family == "gemma4":
        places = torch.arange(vision.pooling_kernel_size, device=weight.device)
        pixels = ones(1, len(places) ** 2, channels * patch**2)
        return {"pixel_values": pixels, "image_position_ids": torch.cartesian_prod(places, places)[None]}
    if family == "lfm2_vl":
        side = math.isqrt(vision.num_patches)
        pixels = ones(1, side**2, channels * patch**2)
        return {
            "pixel_values": pixels,
            "spatial_shapes": sizes(side, side),
            "pixel_attention_mask": torch.ones(1, side**2, dtype=torch.long, device=weight.device),
        }
    if vision.model_type == "pixtral":
        side = patch * getattr(config, "spatial_merge_size", 1)  # two tokens: Mistral 3 cannot split one
        return {"pixel_values": ones(1, channels, 2 * side, side), "image_sizes": sizes(2 * side, side)}
    size = vision.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if family in ("llava_next", "llava_onevision"):
        area = min(config.image_grid_pinpoints, key=math.prod)
        tiles = 1 + math.prod(area) // (height * width)
        return {"pixel_values": ones(1, tiles, channels, height, width), "image_sizes": sizes(*area)}
    rows = (1, 1) if family in ROWS_OF_IMAGES else (1,)
    return {"pixel_values": ones(*rows, channels, height, width)}


def _tower(root: Any, decoder: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model around its decoder, embedding and output layer: the tower and what follows it."""
    text = (decoder, root.get_input_embeddings(), root.get_output_embeddings())
    of_text = {id(module) for part in text if part is not None for module in part.modules()}
    around = {id(root), id(root.base_model)}
    return (module for module in root.modules() if id(module) not in of_text | around)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
