"""Lines about what a first step waits for, on standard error of the first rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def announce(text: str) -> None:
    """Print a line at once, on the first rank of each host alone."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"crosspack: {text}", file=sys.stderr, flush=True)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Announce a piece of work when it begins and, with its seconds, when it ends."""
    announce(f"{what} ...")
    began = time.perf_counter()
    yield
    announce(f"{what}: {time.perf_counter() - began:.1f} s")
