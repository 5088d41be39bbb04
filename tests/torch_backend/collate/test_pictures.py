"""Images of raw examples as RGB: turned as their camera was held, and refused where bytes would be made up."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from packing_core.errors import LayoutError, PackingError
from torch_backend.collate.pictures import pictures_of

pil = pytest.importorskip("PIL.Image", reason="images are decoded by pillow")
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
