"""The tensors of several documents' images as those of packed rows.

The images of each segment, in the order of the segments -> :func:`join_images` -> one tensor for each key, as the
family's processor gives them for a batch of rows. Towers cut off what pads images of unequal size or number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import LayoutError

Images = Mapping[str, Tensor]
ON_HOST = ("image_grid_thw", "video_grid_thw", "image_sizes")  # which models read number by number
PADDING = {
    "image_position_ids": -1,
    "video_position_ids": -1,
}  # what fills up images of unequal size, where it is not 0


def join_images(images: Sequence[Images], rows: Sequence[int], count: int, *, in_rows: bool) -> dict[str, Tensor]:
    """Concatenates the images of segments.

    Args:
        images: of each segment, empty without images.
        rows: the row of each segment.
        count: rows of the batch.
        in_rows: whether the images of a row stand in a row of their own, [B, images, ...], padded with zeros.

    Returns:
        the tensors; none if no segment has images.

    Raises:
        LayoutError: segments have images of different keys.
    """
    shown = [(found, row) for found, row in zip(images, rows, strict=True) if found]
    if not in_rows:
        # images and videos may be in different documents
        keys = dict.fromkeys(key for found, _ in shown for key in found)
        several = {key: [found[key] for found, _ in shown if key in found] for key in keys}
        return {key: _concatenate(each, 0, PADDING.get(key, 0)) for key, each in several.items()}
    joined: dict[str, Tensor] = {}
    for key in shown[0][0] if shown else ():
        if any(key not in found for found, _ in shown):
            raise LayoutError(f"some documents have {key} and others have images without it: process all of them alike")
        of_rows = [[found[key] for found, row in shown if row == number] for number in range(count)]
        first = shown[0][0][key]
        empty = first.new_zeros(1, 0, *first.shape[2:])
        joined[key] = _concatenate([_concatenate(of_row, 1) if of_row else empty for of_row in of_rows], 0)
    return joined


def sizes_of(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, Any], ...]:
    """The sizes and grids among the tensors of images, as plain numbers that no mover of batches takes to a device."""
    return tuple((name, _plain(tensors[name].tolist())) for name in ON_HOST if name in tensors)


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _concatenate(tensors: Sequence[Tensor], axis: int, padding: int = 0) -> Tensor:
    """Concatenates tensors along an axis; the other axes are padded to the longest."""
    sizes = [max(each) for each in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        room = [0 if i == axis else size - tensor.shape[i] for i, size in enumerate(sizes)]
        widths = [width for size in reversed(room) for width in (0, size)]
        padded.append(F.pad(tensor, widths, value=padding) if any(room) else tensor)
    return torch.cat(padded, axis)
