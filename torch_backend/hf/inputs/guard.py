"""Checks of tensor values that do not make the host wait for the device.

A rule of :mod:`.arguments` -> ``guard.check(kind, find, error)`` -> an error now, where the values are on
the host or the rule is used for the first time; otherwise by ``guard.poll()`` in a later call, once a copy of the
one-element result has reached pinned host memory. Under ``torch.compile`` the rule becomes an assertion of the graph.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from packing_core.errors import PackingError

logger = logging.getLogger(__name__)
BROKEN = (
    "{}: a batch in a compiled model breaks a rule of packing. Call the model once on it without torch.compile: the "
    "error there says which token it is and the way out"
)


class PinnedReadback:
    """A bool on its way from the device to the host: into pinned memory, behind the work that computes it."""

    def __init__(self, flag: Tensor) -> None:
        self.host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self.host.copy_(flag, non_blocking=True)
        self.event = torch.accelerator.current_stream(flag.device).record_event()

    def ready(self) -> bool:
        """Returns whether the value has arrived; never waits."""
        return bool(self.event.query())

    def value(self) -> bool:
        """The value; waits until it has arrived."""
        self.event.synchronize()
        return bool(self.host)


@dataclass
class PendingCheck:
    flag: Any
    wrong: Tensor
    error: Callable[[int], PackingError]
    warns: str | None = None  # the kind of a check that warns


def on_host(x: Tensor) -> bool:
    """Returns whether the values of ``x`` can be read without waiting for a device."""
    return x.device.type == "cpu" and has_values(x)


def has_values(x: Tensor) -> bool:
    """Returns whether ``x`` holds values that can be read at all; a fake tensor has none."""
    return not (recording() or isinstance(x, FakeTensor) or x.device.type == "meta")


def recording() -> bool:
    """Returns whether operations are being traced by ``torch.compile`` or captured in a CUDA graph, not run."""
    return torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class Guard:
    """The value checks of one patched model.

    The first check of each kind waits for the device, so a run that is wrong from its start stops in its first step.
    Later checks are asynchronous: :meth:`poll` raises for a batch a call or two after it ran. A copied or unpickled
    guard starts afresh.

    Args:
        immediate: whether the values of a tensor are read at once.
        read_back: starts copying a bool tensor of one element to the host, as :class:`PinnedReadback` does.

    Attributes:
        waits: whether first checks wait for the device, as they do in training.
    """

    def __init__(
        self,
        immediate: Callable[[Tensor], bool] = on_host,
        read_back: Callable[[Tensor], Any] = PinnedReadback,
    ) -> None:
        self.immediate = immediate
        self.read_back = read_back
        self.waits = True
        self.seen: set[str] = set()
        self.begun: Counter[str] = Counter()
        self.warned: set[str] = set()
        self.pending: list[PendingCheck] = []
        self._polling = threading.Lock()  # several threads may call the model

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, (self.immediate, self.read_back)

    def begins(self, kind: str, batches: int) -> bool:
        """Returns whether this is one of the first batches that a check looks at, and counts it."""
        self.begun[kind] += 1
        return self.begun[kind] <= batches

    def check(
        self,
        kind: str,
        find: Callable[[], Tensor],
        error: Callable[[int], PackingError],
        *,
        warns: bool = False,
    ) -> None:
        """Raise ``error(i)``, now or in a later :meth:`poll`, if any element of ``find()`` is true.

        Args:
            kind: names the check; the first one of each kind that raises waits for the device, if the guard ``waits``.
            find: computes a bool tensor that marks violations; not called while a CUDA graph is captured.
            error: makes the exception from the flat index of the first violation.
            warns: log the error once in place of raising it; compiled graphs do not look.
        """
        if warns and (torch.compiler.is_compiling() or kind in self.warned):
            return
        if torch.compiler.is_compiling():
            # the values come when the graph runs; an error of ours could only be made where it breaks the graph
            torch._assert_async(~find().any(), BROKEN.format(kind))
            return
        if recording():
            return
        wrong = find()
        if wrong.numel() == 0 or not has_values(wrong):
            return
        immediate = self.immediate(wrong)
        if immediate or (self.waits and not warns and kind not in self.seen):
            if not immediate:
                self.seen.add(kind)
            if bool(wrong.any()):
                self._report(error(_first(wrong)), kind if warns else None)
        else:
            self.pending.append(PendingCheck(self.read_back(wrong.any()), wrong, error, kind if warns else None))

    def poll(self, *, wait: bool = False) -> None:
        """Raise for the first earlier batch whose result has arrived and is a violation.

        Args:
            wait: wait for the results that have not arrived.

        Raises:
            PackingError: the error of the check.
        """
        if recording():
            return
        with self._polling:
            while self.pending and (wait or self.pending[0].flag.ready()):
                check = self.pending.pop(0)
                if check.flag.value():
                    if check.warns is None:
                        self.pending.clear()
                    error = check.error(_first(check.wrong))
                    self._report(error.reworded(f"in an earlier batch: {error}"), check.warns)

    def _report(self, error: PackingError, warns: str | None) -> None:
        if warns is None:
            raise error
        if warns not in self.warned:
            self.warned.add(warns)
            logger.warning("%s", error)


def _first(wrong: Tensor) -> int:
    return int(wrong.flatten().int().argmax())
