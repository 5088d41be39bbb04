"""The messages of raw records: the kinds of media in their parts, which APIs write in other ways, and their tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from packing_core.errors import PackingError

KINDS = ("image", "video", "audio")  # columns are named by one, or by several, as TRL names those of images
# the types of parts in OpenAI's and others' APIs -> those of chat templates
_TYPES = {name: kind for kind in KINDS for name in (f"{kind}_url", f"input_{kind}")}
_TYPES |= {"input_text": "text", "output_text": "text"}
_SOURCES = ("path", "url", "base64")  # where a part may have its image, beside its own type


def kind_of(type_of_part: object) -> str:
    """Returns the type by which chat templates know a part of a message.

    >>> [kind_of(name) for name in ("image_url", "input_audio", "output_text", "image", "image_description")]
    ['image', 'audio', 'text', 'image', 'image_description']
    """
    return _TYPES.get(str(type_of_part), str(type_of_part))


def as_turn(turn: Any) -> Any:
    """Returns a message with its parts as chat templates know them, and each image or clip under its kind.

    >>> as_turn({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]})
    {'role': 'user', 'content': [{'type': 'image', 'image': 'a.png'}]}
    >>> as_turn({"content": [{"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}]})
    {'content': [{'type': 'audio', 'audio': 'data:audio/wav;base64,UklG'}]}

    Keys without a value go, as Arrow writes them beside those of other parts, because templates ask for names alone:

    >>> as_turn({"content": [{"type": "text", "text": "Hi", "image_url": None}]})
    {'content': [{'type': 'text', 'text': 'Hi'}]}
    """
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), list | tuple):
        return turn
    parts = [_as_part(part) if isinstance(part, Mapping) else part for part in turn["content"]]
    return {**turn, "content": parts}


def _as_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    part = {name: value for name, value in part.items() if not _is_empty(value)}
    kind = kind_of(part.get("type"))
    if kind not in KINDS:
        return {**part, "type": kind} if kind == "text" else part
    names = (kind, str(part["type"]), f"{kind}_url", *_SOURCES)
    name = next((name for name in names if name in part), None)
    if name is None:
        return {"type": kind}
    value, suffix = part[name], "*"
    if isinstance(value, Mapping) and value.get("url") is not None:
        value = value["url"]
    elif isinstance(value, Mapping) and value.get("data") is not None:
        name, value, suffix = "base64", value["data"], value.get("format", suffix)
    if name == "base64" and not str(value).startswith("data:"):
        value = f"data:{kind}/{suffix};base64,{value}"
    return {"type": kind, kind: value}


def _is_empty(value: Any) -> bool:
    """Returns whether a key of a part has no value: None, or a struct whose fields have none."""
    return all(x is None for x in value.values()) if isinstance(value, Mapping) else value is None


def tools_of(record: Mapping[str, Any], where: object) -> Any:
    """Returns the tools that a chat template takes, None for none; files often hold them as JSON.

    Raises:
        PackingError: they are a string that is not JSON.
    """
    tools = record.get("tools")
    if not isinstance(tools, str):
        return tools or None
    try:
        return (json.loads(tools) or None) if tools.strip() else None
    except ValueError as error:
        raise PackingError(f"{where}: tools is a string that is not JSON: {error}") from None
