"""The images of the documents that ``audit(trainer)`` compares: whose they are, and documents alone with theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packing_core.errors import UnsupportedError
from torch_backend.collate.image_tensors import Images
from torch_backend.collate.vision import VisionRows
from torch_backend.hf.anatomy.audio import FEATURES
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.anatomy.vision import kinds_of_tokens, vision_of
from torch_backend.hf.blank_images import takes_media
from torch_backend.hf.inputs.padded_images import image_keys


def rows_with_images(collator: Any, features: Any) -> VisionRows | None:
    """The rows that a collator makes of features with images; None if it makes none of images."""
    reader = getattr(collator, "vision", None)
    if reader is None:
        return None
    rows: VisionRows = reader.rows(
        features, collator.pack, collator.capacity, collator.plan_options.get("overflow", "error")
    )
    return rows


def images_of(features: list[Any], documents: int) -> list[Images]:
    """The images of each document of the features, in their order; none of features that are tokens alone."""
    found = [images for feature in features if isinstance(feature, VisionRows) for images in feature.images]
    return found or [{} for _ in range(documents)]


def alone_with(model: Any, ids: Tensor, images: Images) -> dict[str, Any]:
    """Returns the inputs of a document [1, L] alone beside its tokens: its images and, in M-RoPE families, token types.

    Positions are left to the model, which numbers a document by itself.
    """
    if not images:
        return {}
    inputs: dict[str, Any] = {name: x.to(ids.device) for name, x in images.items()}
    vision = vision_of(model)
    if vision.audio is not None:
        inputs["attention_mask"] = torch.ones_like(ids)
    elif vision.indexer is not None:
        inputs["mm_token_type_ids"] = kinds_of_tokens(vision.indexer.config, ids)
    return inputs


def is_placeholder(model: Any, ids: Tensor) -> Tensor:
    """Marks the tokens that stand for images, which no other token can replace; bool, as ``ids``."""
    if not takes_media(causal_lm(model).config):
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(sorted(vision_of(model).placeholders), device=ids.device))


def images_of_rows(root: Any, kwargs: Mapping[str, Any]) -> list[Images]:
    """The images of each row of a padded call.

    Images and their tokens come in one order. A grid says how many tokens an image has; without grids all images have
    as many.

    Raises:
        UnsupportedError: images differ in their number of tokens, and nothing says which has how many.
    """
    ids_BS: Tensor = kwargs["input_ids"]
    given = {name: kwargs[name] for name in image_keys(root) if kwargs.get(name) is not None}
    if "pixel_values_videos" in given or given.keys() >= {"pixel_values", FEATURES}:
        raise UnsupportedError("the audit cannot tell which videos or clips belong to which answer: audit with images")
    if "pixel_values" not in given:
        return [{} for _ in ids_BS]
    vision = vision_of(root)
    tokens_B = is_placeholder(root, ids_BS).sum(1)
    if vision.in_rows:
        shown = tokens_B.tolist()
        return [{name: x[[row]] for name, x in given.items()} if shown[row] else {} for row in range(len(shown))]
    if vision.merge is not None:
        patches = given["image_grid_thw"].prod(-1)
        ends = (patches // vision.merge).cumsum(0)
        counts = torch.searchsorted(ends, tokens_B.cumsum(0), right=True).diff(prepend=ends.new_zeros(1)).tolist()
        pixels = [int(of_row.sum()) for of_row in patches.split(counts)]
        sizes = {"pixel_values": pixels, "image_grid_thw": counts}
    else:
        units, total = len(given["pixel_values"]), int(tokens_B.sum())
        if bool((tokens_B * units % total).any()):
            raise UnsupportedError(
                f"the audit cannot tell which images of {type(root).__name__} belong to which answer, because their "
                "numbers of tokens differ: audit with images of one size"
            )
        sizes = dict.fromkeys(given, (tokens_B * units // total).tolist())
    parts = {name: x.split(sizes[name]) for name, x in given.items()}
    found = [{name: part[row] for name, part in parts.items()} for row in range(len(ids_BS))]
    return [images if len(images["pixel_values"]) else {} for images in found]
