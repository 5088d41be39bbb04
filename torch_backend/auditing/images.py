"""The images of the documents that ``audit(trainer)`` compares: whose they are, and documents alone with theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_backend.collate.image_tensors import Images
from torch_backend.collate.vision import VisionRows
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.anatomy.vision import vision_of


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
    if (indexer := vision_of(model).indexer) is not None:
        config = indexer.config
        videos = ids == getattr(config, "video_token_id", -1)
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).long() + 2 * videos.long()
    return inputs


def is_placeholder(model: Any, ids: Tensor) -> Tensor:
    """Marks the tokens that stand for images, which no other token can replace; bool, as ``ids``."""
    if getattr(causal_lm(model).config, "vision_config", None) is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    return torch.isin(ids, torch.tensor(sorted(vision_of(model).placeholders), device=ids.device))
