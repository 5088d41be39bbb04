"""Images before a model: decoded as RGB, joined into the tensors of a batch, and the grids of their patches."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core.errors import LayoutError, PackingError
from tests.torch_backend.processors import tiny_processor
from tests.torch_backend.vision_models import vision_model
from torch_backend.collate.image_tensors import join_images
from torch_backend.collate.pictures import has_media, pictures_of, turns_of
from torch_backend.collate.vision import VisionReader
from torch_backend.hf.edits import grids
from torch_backend.hf.edits.grids import of_grids

pil = pytest.importorskip("PIL.Image", reason="images are decoded by pillow")
vision = pytest.importorskip("transformers.vision_utils", reason="older versions of transformers have no such module")


RGB = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)


def decoded(image: Any) -> NDArray[Any]:
    (found,) = pictures_of({"images": [image]}, "example 3")
    assert found.mode == "RGB"
    return np.asarray(found)


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA", "1", "CMYK"])
def test_images_of_every_mode_become_rgb(mode: str, tmp_path: Any) -> None:
    image = pil.fromarray(RGB).convert(mode)
    assert np.array_equal(decoded(image), np.asarray(image.convert("RGB")))
    if mode != "CMYK":
        (tmp_path / "image.png").write_bytes(encoded(image, "PNG"))
        assert np.array_equal(decoded(str(tmp_path / "image.png")), np.asarray(image.convert("RGB")))


def test_photographs_are_turned_as_transformers_and_datasets_turn_them(tmp_path: Any) -> None:
    mark = pil.Exif()
    mark[0x0112] = 6  # the camera was held with its right side down
    data = encoded(pil.fromarray(RGB), "PNG", exif=mark)
    (tmp_path / "image.png").write_bytes(data)
    upright = np.rot90(RGB, -1)
    for image in (data, {"bytes": data, "path": None}, str(tmp_path / "image.png"), pil.open(io.BytesIO(data))):
        assert np.array_equal(decoded(image), upright)


def test_one_image_beside_a_list_of_images_is_refused() -> None:
    """It would be left out without a word."""
    image = pil.fromarray(RGB)
    with pytest.raises(LayoutError, match="example 3 has image and images: pass all of them as images"):
        pictures_of({"image": image, "images": [image]}, "example 3")
    assert len(pictures_of({"image": image, "images": []}, "example 3")) == 1
    assert len(pictures_of({"image": None, "images": image}, "example 3")) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint16])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3)])
def test_arrays_of_other_numbers_than_bytes_are_refused(dtype: Any, shape: tuple[int, ...]) -> None:
    """Pillow would make gray floats from 0 to 1 black, and gray numbers of 16 bits white."""
    message = f"example 3: image 0 cannot be decoded .TypeError: an array of {np.dtype(dtype)}: pass bytes from 0 to"
    with pytest.raises(PackingError, match=message):
        decoded(np.ones(shape, dtype))


def test_files_of_more_bits_are_refused() -> None:
    data = encoded(pil.fromarray(RGB[..., 0].astype(np.uint16) * 257), "PNG")
    for image in (data, pil.open(io.BytesIO(data)), pil.fromarray(RGB[..., 0]).convert("F")):
        with pytest.raises(
            PackingError, match="image 0 cannot be decoded .*more than 8 bits a channel, and would be cut"
        ):
            decoded(image)


@pytest.mark.parametrize("turns", ["messages", "prompt"])
def test_images_stand_in_turns_or_beside_them_for_the_places_in_turns(turns: str) -> None:
    own = {"role": "user", "content": [{"type": "image", "image": RGB}, {"type": "text", "text": "?"}]}
    place = {"role": "user", "content": [{"type": "image"}]}
    found = pictures_of({turns: [place, own], "image": RGB[:2]}, "example 3")
    assert [np.asarray(image).tolist() for image in found] == [RGB[:2].tolist(), RGB.tolist()]
    with pytest.raises(LayoutError, match="1 places for images and 0 images"):
        pictures_of({turns: [place]}, "example 3")


@pytest.mark.parametrize("write", [lambda x: x, lambda x: {"url": x, "detail": "auto"}], ids=["text", "object"])
@pytest.mark.parametrize(
    ("type_of_part", "key"),
    [("image", "image"), ("image", "url"), ("image_url", "image_url"), ("input_image", "image_url")],
)
def test_parts_of_apis_hold_paths_and_uris(type_of_part: str, key: str, write: Any, tmp_path: Path) -> None:
    data = encoded(pil.fromarray(RGB), "PNG")
    (tmp_path / "an image.png").write_bytes(data)
    inline = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    uri = (tmp_path / "an image.png").as_uri()
    for source in (str(tmp_path / "an image.png"), uri, uri.replace("file", "FILE"), inline):
        part = {"type": type_of_part, "text": None, key: write(source)}
        (image,) = pictures_of({"messages": [{"role": "user", "content": [part]}]}, "example 3")
        assert np.array_equal(np.asarray(image), RGB)


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    pil.fromarray(RGB).save(tmp_path / "x.png")
    with pytest.raises(PackingError, match=r"file://elsewhere.*x\.png names a file of another machine"):
        pictures_of({"image": f"file://elsewhere{tmp_path}/x.png"}, "example 3")


def test_a_struct_of_nothing_is_a_place_for_an_image() -> None:
    part = {"type": "image_url", "image_url": {"url": None, "detail": None}}
    example = {"messages": [{"role": "user", "content": [part]}], "image": RGB}
    (image,) = pictures_of(example, "example 3")
    assert np.array_equal(np.asarray(image), RGB)


def test_a_part_may_hold_its_image_in_base64() -> None:
    text = base64.b64encode(encoded(pil.fromarray(RGB), "PNG")).decode()
    for source in (text, f"data:image/png;base64,{text}"):
        part = {"type": "image", "base64": source}
        (image,) = pictures_of({"messages": [{"role": "user", "content": [part]}]}, "example 3")
        assert np.array_equal(np.asarray(image), RGB)


def test_a_part_of_an_api_without_an_image_is_a_place_for_one() -> None:
    example = {"messages": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-7"}]}]}
    with pytest.raises(LayoutError, match="example 3 has 1 places for images and 0 images"):
        pictures_of(example, "example 3")


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


@pytest.mark.parametrize("column", [[5, 6], ["a", "b"], [{"role": "user", "content": ["a", "b"]}], 7])
def test_columns_that_hold_no_messages_have_no_media(column: Any) -> None:
    example = {"prompt": column} if isinstance(column, list) else {"messages": [{"role": "user", "content": column}]}
    assert not has_media(example, turns_of(example), "image")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_template_gets_the_tools_of_a_chat(as_text: bool) -> None:
    processor = tiny_processor("llava")
    written = "{% for tool in tools or [] %}{{ tool['name'] + ' ' }}{% endfor %}"
    processor.chat_template = written + processor.chat_template
    reader, tools = VisionReader(vision_model("llava"), processor), [{"name": "w30"}, {"name": "w31"}]
    beside = {"tools": json.dumps(tools) if as_text else tools}
    user, assistant = {"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}
    for example in ({"messages": [user, assistant]}, {"prompt": [user], "completion": [assistant]}):
        plain, whole = (reader.read({**example, **more}, "it").columns["input_ids"].tolist() for more in ({}, beside))
        assert whole == [30, 31, *plain]
