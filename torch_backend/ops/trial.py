"""Trial runs: code that finds out what works here, apart from the step that asked.

A model's forward can ask in the middle of anything: under autocast, in inference mode, with fake tensors, inside a
checkpointed layer whose hooks count every tensor that is saved, where waiting for the device is forbidden. All but the
last belong to the thread, so a trial runs in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def apart(trial: Callable[P, R]) -> Callable[P, R]:
    """``trial``, run in a new thread: none of its caller's modes and hooks apply, and gradients are enabled."""

    @wraps(trial)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(trial, *args, **kwargs).result()

    return run


def refusal(error: Callable[[], float], tolerance: float) -> str | None:
    """Why what ``error()`` tries out cannot be used: it raises, or is wrong by more than ``tolerance``; else None."""
    try:
        found = error()
    except ImportError as failure:
        return f"cannot be imported: {failure}"
    except Exception as failure:  # whatever it raises is the reason why it cannot be used here
        text = str(failure).strip() or "no message"
        return f"its trial run raised {type(failure).__name__}: {text.splitlines()[0]}"
    return None if found <= tolerance else f"its trial run was wrong by {found:.2g} of what is right"


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """``device`` is the current one, and reading results back from it is allowed whatever the process forbids."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        with torch.cuda.device(device) if device.index is not None else nullcontext():
            yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
