"""The images of a raw example, decoded: those in its messages, and those of its columns ``images`` and ``image``."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.media import as_turn
from packing_core.errors import LayoutError, naming
from packing_core.extras import require

CHATS = ("messages", "prompt", "completion")  # columns that may hold messages
LEAVE_OUT = "repair it or leave out the example"  # the way out of what cannot be decoded
_MORE_BITS = ("I", "F")  # how modes of 16 and 32 bits begin, whose numbers mean what their maker says


def pictures_of(example: Mapping[str, Any], where: str) -> list[Any]:
    """Decodes the images of an example as RGB, in the order of their places.

    Args:
        example: ``images``, a list, or ``image``; and ``messages`` or a ``prompt`` whose parts may have images of their
            own (``{"type": "image", "image": ...}``, ``path``, ``url`` or ``base64``, or ``image_url`` as OpenAI's API
            has them). Each is a PIL image, a path, a URL, an array [H, W, 3] or [H, W] of bytes, or
            ``{"bytes": ..., "path": ...}`` as ``datasets`` stores them.
        where: what messages call the example.

    Raises:
        PackingError: an image cannot be decoded.
        LayoutError: there are more or fewer images than places without one, or ``image`` and ``images``.
    """
    return [
        _decode(image, f"{where}: image {number}") for number, image in enumerate(media_of(example, "image", where))
    ]


def media_of(example: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    """The images or clips of an example as they come, in the order of their places.

    Args:
        example: a column ``images``, a list, or ``image``, likewise of another ``kind``; and chats whose parts of that
            type may have one of their own.

    Raises:
        LayoutError: there are more or fewer than places without one, or both columns.
    """
    several, single = example.get(f"{kind}s"), example.get(kind)
    listed = [] if several is None else [several]
    if isinstance(several, Sequence) and not isinstance(several, str):
        listed = list(several)
    if listed and single is not None:
        raise LayoutError(f"{where} has {kind} and {kind}s: pass all of them as {kind}s")
    listed = listed if single is None else [single]
    chat = "messages" if example.get("messages") is not None else "prompt"
    parts = [part for part in _parts(turns_of(example, (chat,))) if part.get("type") == kind]
    own = [part.get(kind) for part in parts]
    free = sum(one is None for one in own)
    if parts and free != len(listed):
        raise LayoutError(f"{where} has {free} places for {kind}s and {len(listed)} {kind}s: they must agree")
    rest = iter(listed)
    return [one if one is not None else next(rest) for one in own] if parts else listed


def has_media(example: Mapping[str, Any], turns: Iterable[Mapping[str, Any]], kind: str) -> bool:
    """Returns whether an example has images, clips or videos, by their ``kind``, in its columns or in its messages."""
    columns = (example.get(kind), example.get(f"{kind}s"))
    shown = any(x is not None and not (isinstance(x, Sized) and len(x) == 0) for x in columns)
    return shown or any(part.get("type") == kind for part in _parts(turns))


def turns_of(example: Mapping[str, Any], names: Sequence[str] = CHATS) -> list[Any]:
    """Returns the messages of an example in the columns ``names``, of which each may be a string, by ``as_turn``."""
    chats = [example.get(name) for name in names]
    return [as_turn(turn) for chat in chats if chat is not None and not isinstance(chat, str) for turn in chat]


def has_own_pictures(turns: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether a part of messages holds or names an image itself."""
    return any(part.get("type") == "image" and part.get("image") is not None for part in _parts(turns))


def of_uri(source: Any) -> Any:
    """Returns the bytes of a ``data:`` or ``file:`` URI; all else as it is."""
    scheme = source[:5].lower() if isinstance(source, str) else ""
    if scheme == "data:":
        kind, _, content = source.partition(",")
        return b64decode(content) if kind.lower().endswith(";base64") else unquote_to_bytes(content)
    if scheme != "file:":
        return source
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{source} names a file of another machine")
    return Path(url2pathname(parts.path)).read_bytes()


def _parts(turns: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if isinstance(part, Mapping)]


def _of_bytes(image: NDArray[Any]) -> NDArray[Any]:
    if image.dtype not in (np.uint8, np.bool_):
        raise TypeError(f"an array of {image.dtype}: pass bytes from 0 to 255, uint8")
    return image


def _decode(image: Any, what: str) -> Any:
    pil = require("PIL.Image", extra="hf", distribution="pillow")
    with naming(f"{what} cannot be decoded", way_out=LEAVE_OUT, with_kind=True):
        if isinstance(image, Mapping):
            image = image["bytes"] if image.get("bytes") is not None else image["path"]
        image = of_uri(image)
        if isinstance(image, bytes):
            image = pil.open(io.BytesIO(image))
        elif isinstance(image, str) and image.startswith(("http://", "https://")):
            image = require("transformers.image_utils", extra="hf").load_image(image)
        elif hasattr(image, "__array__") and not isinstance(image, pil.Image):
            image = pil.fromarray(_of_bytes(np.asarray(image)))
        elif not isinstance(image, pil.Image):
            image = pil.open(image)
        if image.mode.startswith(_MORE_BITS):
            raise ValueError(f"mode {image.mode} has more than 8 bits a channel, and would be cut off at 255")
        # cameras store how they were held; transformers and datasets turn images likewise
        return require("PIL.ImageOps", extra="hf", distribution="pillow").exif_transpose(image).convert("RGB")
