"""Grids of single images, joined, give what transformers makes of all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_backend.hf.edits import grids
from torch_backend.hf.edits.grids import of_grids

vision = pytest.importorskip("transformers.vision_utils", reason="older versions of transformers have no such module")
GRIDS = torch.tensor([[1, 4, 6], [1, 2, 2], [3, 8, 10], [1, 4, 6], [2, 6, 4]])
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "get_vision_position_ids": ((2,), {}),
    "get_vision_window_index": ((), {"spatial_merge_size": 2, "window_size": 56, "patch_size": 14}),
    "get_vision_attention_seqlens": ((SimpleNamespace(_attn_implementation="sdpa"),), {}),
    "get_vision_cu_seqlens": ((), {}),
    "get_vision_interpolation_indices_and_weights": (
        (),
        {"num_grid_per_side": 4, "mode": "bilinear", "align_corners": True, "spatial_merge_size": 2},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_images_are_joined_as_transformers_makes_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, (args, named) = getattr(vision, name, None), CALLS[name]
    if function is None:
        pytest.skip("another version of transformers has this function")
    want, others = function(GRIDS, *args, **named), {"packed": 1}
    for _ in range(2):  # the second time from what is kept
        got = of_grids(function, GRIDS, *args, **named, kwargs=others)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert one is other is None or (one.dtype == other.dtype and torch.equal(one, other))
        assert others == {"packed": 1}


def test_images_of_one_size_are_computed_once() -> None:
    calls = []

    def get_vision_position_ids(grid: torch.Tensor, merge: int) -> torch.Tensor:
        calls.append(grid.tolist())
        return grid

    grids._of_image.cache_clear()
    assert torch.equal(of_grids(get_vision_position_ids, GRIDS, 2, kwargs={}), GRIDS)
    assert calls == [[[1, 4, 6]], [[1, 2, 2]], [[3, 8, 10]], [[2, 6, 4]]]


@pytest.mark.parametrize("name", ["get_vision_position_ids", "get_vision_window_index"])
def test_a_default_device_moves_no_grid_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(grid: torch.Tensor) -> Any:
        ends = torch.zeros_like(grid[0, :2], dtype=torch.int32)
        return (grid[0], ends) if name == "get_vision_window_index" else grid

    monkeypatch.setattr(function, "__name__", name)
    grids._of_image.cache_clear()
    with torch.device("meta"):
        found = of_grids(function, GRIDS, kwargs={})
    assert all(x.device.type == "cpu" for x in (found if isinstance(found, tuple) else (found,)))
