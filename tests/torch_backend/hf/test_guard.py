"""Guard: values on the host are checked at once, values on a device without waiting for each batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError
from tests.torch_backend.guards import DeviceGuard, SlowCopy
from torch_backend.hf.inputs.guard import Guard, PendingCheck


def wrong(*values: int) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values) > 0


def error(i: int) -> LayoutError:
    return LayoutError(f"element {i} is wrong")


def test_later_checks_do_not_wait_and_raise_once_their_copy_has_arrived() -> None:
    guard = DeviceGuard()
    guard.check("kind", wrong(0, 0, 0), error)
    guard.check("kind", wrong(0, 0, 1), error)
    guard.poll()
    guard.copies[0].arrived = True
    with pytest.raises(LayoutError, match="^in an earlier batch: element 2 is wrong$"):
        guard.poll()
    guard.poll()  # raised once


def test_right_values_leave_nothing_behind() -> None:
    guard = DeviceGuard()
    for _ in range(5):
        guard.check("kind", wrong(0), error)
        for readback in guard.copies:
            readback.arrived = True
        guard.poll()
    assert len(guard.copies) == 4 and guard.pending == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))])
def test_a_copy_starts_afresh(copied: Callable[[Any], Any]) -> None:
    guard = Guard(read_back=SlowCopy)
    guard.seen.add("kind")
    guard.pending.append(PendingCheck(SlowCopy(torch.tensor(True)), torch.tensor([True]), error))
    fresh = copied(guard)
    assert fresh.read_back is SlowCopy and fresh.seen == set() and fresh.pending == []
    fresh.poll(wait=True)
