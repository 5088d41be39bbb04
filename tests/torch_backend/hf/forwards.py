"""Forwards of layers that are written as their statements, with the source that ``inspect`` finds."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from itertools import count
from typing import Any

_NUMBERS = count()


def written(*statements: str) -> Callable[..., Any]:
    """Returns a function of ``self``, ``x`` and keywords that has these statements."""
    text, name = "\n    ".join(["def forward(self, x, **kwargs):", *statements]), f"<forward {next(_NUMBERS)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    names: dict[str, Callable[..., Any]] = {}
    exec(compile(text, name, "exec"), names)
    return names["forward"]
