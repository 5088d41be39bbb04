"""Limits on the time and the memory of a chat template, which is a program of somebody else."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crosspack.reading.files import MAX_RECORD, size_text
from packing_core.errors import PackingError

SECONDS = 10.0
GROWTH = 1 << 30  # bytes by which the process may grow meanwhile
_EVERY = 0.1  # seconds between two looks


@contextmanager
def limited(seconds: float = SECONDS, growth: int = GROWTH) -> Iterator[None]:
    """Ends what runs inside by a PackingError once it takes more time or memory.

    It looks by a signal, so it can do so in the main thread of a process alone, where the console and its workers run
    templates, and only between two steps of Python.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not hasattr(signal, "setitimer") or not in_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    end, most = time.monotonic() + seconds, _largest() + growth

    def look(number: int, frame: Any) -> None:
        if time.monotonic() > end:
            raise PackingError(f"the chat template runs for more than {seconds:g} seconds: it may not end")
        if _largest() > most:
            raise PackingError(f"the chat template takes more than {size_text(growth)} of memory")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _EVERY, _EVERY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_written(chat: str) -> str:
    """Returns what a template wrote.

    Raises:
        PackingError: it is longer than a record may be.
    """
    if len(chat) > MAX_RECORD:
        raise PackingError(f"the chat template wrote more than {size_text(MAX_RECORD)}")
    return chat


def _largest() -> int:
    """Returns the most bytes that the process has had in memory."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
