"""Trial runs: code that finds out which implementations work here, isolated from the step that needs to know.

A forward may start a trial under autocast, in inference mode, with fake tensors, inside a checkpointed layer whose
hooks count every saved tensor, or where waiting for the device is forbidden. All but the last are states of the
thread, so a trial runs in a thread of its own. :func:`current_device` lifts the last.

A layer that is recomputed under a reentrant checkpoint may start one too, in autograd's thread of the device. That
thread waits for the trial then, so the trial's own backward must not be queued to it: it runs in the trial's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")


def in_own_thread(trial: Callable[P, R]) -> Callable[P, R]:
    """``trial`` in a new thread, its backward too: no mode or hook of the caller applies, and gradients are enabled."""

    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autograd.set_multithreading_enabled(False):
            return trial(*args, **kwargs)

    @wraps(trial)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(alone, *args, **kwargs).result()

    return run


def decided_by_one_rank(question: str, decide: Callable[[], str]) -> str:
    """Returns ``decide()`` of whichever rank of the job answered ``question`` first; of this process where it is alone.

    The answer is kept in the store of the process group. A broadcast would hang, because ranks with other documents ask
    other questions, and rank 0 perhaps none of them.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return decide()
    store, key = dist.distributed_c10d._get_default_store(), f"crosspack: {question}"
    answer: bytes = store.get(key) if store.check([key]) else store.compare_set(key, "", decide())
    return answer.decode()


def refusal(errors: Callable[[], list[float]], tolerance: float) -> str | None:
    """Explains why an implementation is refused: a trial raises, or an error of its results exceeds ``tolerance``.

    An error that is not a number exceeds it too. None if the implementation is usable.
    """
    try:
        wrong = [error for error in errors() if not error <= tolerance]
    except ImportError as failure:
        return f"cannot be imported: {failure}"
    except Exception as failure:  # whatever it raises is the reason why it cannot be used here
        text = str(failure).strip() or "no message"
        return f"its trial run raised {type(failure).__name__}: {text.splitlines()[0]}"
    return f"its trial run was wrong by {max(wrong):.2g} of what is right" if wrong else None


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current one, and allow results to be read back from it even where the process forbids it."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    if mode:  # setting it, to whatever, warns
        torch.cuda.set_sync_debug_mode("default")
    try:
        with torch.cuda.device(device) if device.index is not None else nullcontext():
            yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)
