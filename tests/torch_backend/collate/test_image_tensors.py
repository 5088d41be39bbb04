"""Images of segments joined into the tensors of a batch, without a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.collate.image_tensors import join_images


def images(*values: int, width: int = 2) -> dict[str, Tensor]:
    """One row of images of 2 x width pixels, all of one value each, and their masks."""
    pixels = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1).repeat(1, 1, 3, 2, width)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, len(values), 2, width)}


def test_images_stand_in_the_row_of_their_segments() -> None:
    # rows: | text |, | one image | text | two wider images |
    batch = join_images([{}, images(1), {}, images(2, 3, width=4)], [0, 1, 1, 1], 2, in_rows=True)
    assert batch["pixel_values"].shape == (2, 3, 3, 2, 4)
    assert batch["pixel_values"][:, :, 0, 0].tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 0, 0], [2, 2, 2, 2], [3, 3, 3, 3]],
    ]
    assert batch["pixel_attention_mask"].sum((2, 3)).tolist() == [[0, 0, 0], [4, 8, 8]]


@pytest.mark.parametrize("in_rows", [True, False])
def test_the_images_of_one_segment_are_the_images_of_its_batch(in_rows: bool) -> None:
    batch = join_images([{}, images(1)], [0, 0], 1, in_rows=in_rows)
    assert {name: x.tolist() for name, x in batch.items()} == {name: x.tolist() for name, x in images(1).items()}
    assert join_images([{}, {}], [0, 0], 1, in_rows=in_rows) == {}


def test_images_of_other_keys_are_refused_in_rows_and_stand_beside_each_other_without() -> None:
    plain = {"pixel_values": images(2)["pixel_values"]}
    with pytest.raises(LayoutError, match="some documents have pixel_attention_mask and others have images without it"):
        join_images([images(1), plain], [0, 0], 1, in_rows=True)
    batch = join_images([images(1), plain], [0, 0], 1, in_rows=False)
    assert {name: len(x) for name, x in batch.items()} == {"pixel_values": 2, "pixel_attention_mask": 1}
