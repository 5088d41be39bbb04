"""Marks the time in which the forward of a layer runs again, for what its backward reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()  # a backward runs on threads of its own


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, results that no backward reads need not be computed."""
    before, _thread.active = is_recomputing(), True
    try:
        yield
    finally:
        _thread.active = before


def is_recomputing() -> bool:
    """Returns whether this thread is inside :func:`recomputing`."""
    return getattr(_thread, "active", False)
