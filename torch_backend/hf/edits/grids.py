"""Joins what transformers' towers make of the grids of images from what they make of each image, which is kept.

Their functions make some twenty small tensors for every image, while a GPU waits. Images of a data set have few sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

IMAGES = 512  # sizes of images whose results are kept
_KEPT = (int, float, str, bool)
# What these functions return as it is, where the arguments of the tower have it.
_GIVEN = {"position_ids", "window_index", "cu_window_seqlens", "interp_indices", "interp_weights"}


def of_grids(function: Callable[..., Any], grid: Tensor, *args: Any, **named: Any) -> Any:
    """``function(grid, *args, **named)``, where ``grid`` is int64 [images, 3] on the host."""
    name, others = function.__name__, {key: value for key, value in named.items() if key != "kwargs"}
    if name in ("get_vision_cu_seqlens", "get_vision_attention_seqlens") and not others and named.get("kwargs"):
        named["kwargs"].setdefault("cu_seqlens", _boundaries(grid))  # which it takes from there, if it finds it
        return function(grid, *args, **named)
    plain = all(isinstance(value, _KEPT) for value in (*args, *others.values()))
    given = _GIVEN & (named.get("kwargs") or {}).keys()
    if name not in _JOINED or not plain or given or not len(grid):
        return function(grid, *args, **named)
    of_images = [_of_image(function, tuple(size), args, tuple(sorted(others.items()))) for size in grid.tolist()]
    return _JOINED[name](of_images)


@lru_cache(IMAGES)
def _of_image(
    function: Callable[..., Any], size: tuple[int, int, int], args: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> Any:
    return function(torch.tensor([size], device="cpu"), *args, **dict(named))


def _boundaries(grid: Tensor) -> Tensor:
    """int32 [frames + 1]: each frame is a segment. torch's own function starts all its threads for a few numbers."""
    time, height, width = grid.numpy().T
    ends = np.repeat(height * width, time).cumsum()
    return torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))


def _behind_each_other(of_images: list[Any]) -> Any:
    if isinstance(of_images[0], tuple):
        return tuple(torch.cat(column) for column in zip(*of_images, strict=True))
    return torch.cat(of_images)


def _windows(of_images: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Places and boundaries of windows, each counted on from the image before."""
    places, boundaries, first, begin = [], [torch.zeros(1, dtype=torch.int32, device="cpu")], 0, 0
    for index, ends in of_images:
        places.append(index + first)
        boundaries.append(ends[1:] + begin)
        first, begin = first + len(index), begin + int(ends[-1])
    return torch.cat(places), torch.cat(boundaries)


_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "get_vision_position_ids": _behind_each_other,
    "get_vision_interpolation_indices_and_weights": _behind_each_other,
    "get_vision_window_index": _windows,
}
