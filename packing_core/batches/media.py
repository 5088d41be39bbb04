"""The kinds of media that raw records have, and the types by which parts of messages name them."""

from __future__ import annotations

KINDS = ("image", "video", "audio")  # columns are named by one, or by several, as TRL names those of images


def is_of(type_of_part: object, kind: str) -> bool:
    """Returns whether a part of a message is of a kind of media, by its type: that of templates, or of an API.

    >>> [is_of(name, "image") for name in ("image", "image_url", "input_image", "image_description", None)]
    [True, True, True, False, False]
    """
    return type_of_part in (kind, f"{kind}_url", f"input_{kind}")
