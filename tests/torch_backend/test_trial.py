"""Trial runs end wherever they begin, also inside the backward of a checkpointed layer."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torch_backend.ops.trial import in_own_thread

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
LIMIT = 30  # seconds; a trial that waits for the thread that waits for it never ends


@in_own_thread
def trial(device: str) -> tuple[float, bool]:
    x = torch.ones(3, device=device, requires_grad=True)
    (2 * x).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum()), torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_trial_ends_inside_the_backward_of_a_reentrant_checkpoint(device: str) -> None:
    found: list[tuple[float, bool]] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # in the backward alone
            found.append(trial(device))
        return 3 * x

    def step() -> None:
        x = torch.ones(2, device=device, requires_grad=True)
        checkpoint(layer, x, use_reentrant=True).sum().backward()

    running = threading.Thread(target=step, daemon=True)
    running.start()
    running.join(LIMIT)
    assert found == [(6.0, False)]
    assert not running.is_alive()
