"""Guard: values on the host are checked at once, values on a device without waiting for each batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from packing_core.errors import LayoutError
from tests.torch_backend.guards import DeviceGuard, SlowCopy
from torch_backend.hf.inputs.guard import Guard, PendingCheck


def wrong(*values: int) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values) > 0


def error(i: int) -> LayoutError:
    return LayoutError(f"element {i} is wrong")


def test_values_on_the_host_are_checked_at_once_every_time() -> None:
    guard = Guard()
    for _ in range(2):
        guard.check("kind", wrong(0, 0), error)
        with pytest.raises(LayoutError, match="^element 1 is wrong$"):
            guard.check("kind", wrong(0, 1, 1), error)


def test_the_first_check_of_each_kind_waits_for_the_device() -> None:
    guard = DeviceGuard()
    for kind in ("one", "other"):
        with pytest.raises(LayoutError, match="^element 0 is wrong$"):
            guard.check(kind, wrong(1), error)
    assert guard.copies == []


def test_later_checks_do_not_wait_and_raise_once_their_copy_has_arrived() -> None:
    guard = DeviceGuard()
    guard.check("kind", wrong(0, 0, 0), error)
    guard.check("kind", wrong(0, 0, 1), error)
    guard.poll()
    guard.copies[0].arrived = True
    with pytest.raises(LayoutError, match="^in an earlier batch: element 2 is wrong$"):
        guard.poll()
    guard.poll()  # raised once


def test_a_check_that_may_not_wait_is_asynchronous_from_the_first_batch_on() -> None:
    guard = DeviceGuard()
    guard.check("kind", wrong(1), error, wait=False)
    with pytest.raises(LayoutError, match="in an earlier batch: element 0"):
        guard.poll(wait=True)


def test_right_values_leave_nothing_behind() -> None:
    guard = DeviceGuard()
    for _ in range(5):
        guard.check("kind", wrong(0), error)
        for readback in guard.copies:
            readback.arrived = True
        guard.poll()
    assert len(guard.copies) == 4 and guard.pending == []


def test_fake_tensors_have_no_values_to_check() -> None:
    with FakeTensorMode():
        Guard().check("kind", lambda: torch.ones(3, dtype=torch.bool), error)


def test_nothing_is_checked_while_operations_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    guard.check("kind", wrong(1), error)
    guard.poll()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_takes_the_check_into_its_graph(backend: str) -> None:
    guard = Guard()

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        guard.poll()
        guard.check("kind", lambda: x > 0, error)
        return x + 1

    assert torch.equal(function(-torch.ones(2)), torch.zeros(2))
    with pytest.raises(RuntimeError, match="kind: a batch in a compiled model .* without torch.compile"):
        function(torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))])
def test_a_copy_starts_afresh(copied: Callable[[Any], Any]) -> None:
    guard = Guard(read_back=SlowCopy)
    guard.seen.add("kind")
    guard.pending.append(PendingCheck(SlowCopy(torch.tensor(True)), torch.tensor([True]), error))
    fresh = copied(guard)
    assert fresh.read_back is SlowCopy and fresh.seen == set() and fresh.pending == []
    fresh.poll(wait=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_later_checks_do_not_synchronise() -> None:
    guard = Guard()
    right, bad = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
    guard.check("kind", lambda: right > 0, error)
    torch.cuda.set_sync_debug_mode("error")
    try:
        guard.check("kind", lambda: right > 0, error)
        guard.poll()
        guard.check("kind", lambda: bad > 0, error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(LayoutError, match="in an earlier batch: element 0 is wrong"):
        guard.poll(wait=True)
