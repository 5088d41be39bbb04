"""Records with images or audio: finds out whether a data set has some, and where those named by a path lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from crosspack.cli.records import open_records, weighted
from crosspack.encoding.layouts import AUDIO, LOOKED_AT, images_in
from crosspack.reading.files import is_url
from crosspack.reading.places import Row
from packing_core.errors import PackingError

_CHATS = ("messages", "prompt", "completion", "chosen", "rejected")


def have_images(data: Sequence[str] | None, split: str) -> bool:
    """Returns whether one of the first records of a data set has images or audio; imports none for local files."""
    for text in data or ():
        with suppress(PackingError):  # raised again, under the name of its option, where the data is opened
            if any(images_in(record) for record in islice(open_records(weighted(text)[0], split=split), LOOKED_AT)):
                return True
    return False


def with_whole_paths(record: Row) -> Row:
    """Returns a record whose images or clips are named by paths from the root, or from here, not from its file."""
    file = Path(record.place.file)
    if not file.is_file():
        return record
    found = dict(record)
    for name in ("images", "image", *AUDIO):
        if found.get(name) is not None:
            found[name] = _whole(found[name], file.parent)
    for name in _CHATS:
        if isinstance(found.get(name), list):
            found[name] = [_turn(turn, file.parent) for turn in found[name]]
    return Row(found, record.place, record.number)


def _turn(turn: Any, folder: Path) -> Any:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), list):
        return turn
    return {**turn, "content": [_part(part, folder) for part in turn["content"]]}


def _part(part: Any, folder: Path) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "audio"):
        return part
    return {
        name: _whole(value, folder) if name in ("image", "audio", "path") else value for name, value in part.items()
    }


def _whole(image: Any, folder: Path) -> Any:
    """An image, or a list of them: a path from ``folder`` becomes one from here, all else stays as it is."""
    if isinstance(image, list):
        return [_whole(each, folder) for each in image]
    if isinstance(image, Mapping) and image.get("bytes") is None and isinstance(image.get("path"), str):
        return {**image, "path": _whole(image["path"], folder)}
    if isinstance(image, str) and not is_url(image) and not image.startswith("data:"):
        return str(folder / image)
    return image
