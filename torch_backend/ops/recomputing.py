"""Marks the time in which the forward of a layer runs again, for what its backward reads.

first forward    keeping(results):      operators that are computed_once add their results to a list
second forward   recomputing(results):  they take them from there, and results that no backward reads are left out
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

_thread = threading.local()  # a backward runs on threads of its own


class KeptResults(NamedTuple):
    """The results of one call of an operator, and how often each of them had been changed in place."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]


@contextmanager
def keeping(results: list[KeptResults]) -> Iterator[None]:
    """Inside, operators that are :func:`computed_once` add what they return to ``results``."""
    with _set(active=False, kept=results, again=None):
        yield


@contextmanager
def recomputing(results: list[KeptResults] | None = None) -> Iterator[None]:
    """Inside, results that no backward reads need not be computed, and ``results`` are returned one after the other."""
    with _set(active=True, kept=None, again=None if results is None else iter(results)):
        yield


def is_recomputing() -> bool:
    """Returns whether this thread is inside :func:`recomputing`."""
    return getattr(_thread, "active", False)


def computed_once(launch: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns ``launch`` of an operator, for which a second forward finds what the first one returned.

    Raises:
        RuntimeError: a layer changed a result in place, so the backward would read something else.
    """

    @wraps(launch)
    def run(*args: Any) -> tuple[Tensor, ...]:
        if (again := getattr(_thread, "again", None)) is not None:
            found: KeptResults = next(again)
            if any(x._version != version for x, version in zip(*found, strict=True)):
                raise RuntimeError(
                    f"a layer changed a result of {launch.__name__} in place, which its backward reads and "
                    'memory="attention" kept: pass memory="full"'
                )
            return found.tensors
        tensors = launch(*args)
        if (kept := getattr(_thread, "kept", None)) is not None:
            kept.append(KeptResults(tensors, tuple(x._version for x in tensors)))
        return tensors

    return run


@contextmanager
def _set(**states: Any) -> Iterator[None]:
    before = dict(_thread.__dict__)
    _thread.__dict__.update(states)
    try:
        yield
    finally:
        _thread.__dict__.clear()
        _thread.__dict__.update(before)
