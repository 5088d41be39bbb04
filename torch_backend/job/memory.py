"""Device memory of a training job: an estimate before the first step, and the measured use of each run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from packing_core.errors import PackingError
from packing_core.training.job import TrainJob
from packing_core.training.memory_model import GIB, MemoryModel
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.job.ranks import Ranks


def states_bytes(model: torch.nn.Module, job: TrainJob) -> tuple[int, int]:
    """Bytes of the weights, and of what training adds: gradients, AdamW's two moments, float32 copies of weights."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    moments = sum(p.numel() for p in trained) * 3 * 4 if job.options.master_weights else 2 * gradients
    return weights, gradients + moments


def memory_line(model: Any, job: TrainJob, ranks: Ranks, device: torch.device) -> str:
    """Compares the memory that a process of the job needs with the memory of the device."""
    weights, others = states_bytes(model, job)
    weights //= ranks.world if job.strategy in ("fsdp", "zero3") else 1
    others //= ranks.world if job.strategy in ("fsdp", "zero2", "zero3") else 1
    line = f"memory: {(weights + others) / GIB:.2f} GiB of weights, gradients and optimizer states"
    with suppress(PackingError):  # of families whose memory the formula does not know
        itemsize = 4 if job.options.precision == "float32" else 2
        formula = MemoryModel.from_config(causal_lm(model).config, fixed=0, gradients=0, itemsize=itemsize)
        level = "full" if job.gradient_checkpointing else "none"
        line += f", and about {formula.bytes(level, job.schedule.plans[0].capacity) / GIB:.2f} GiB of activations"
    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
        line += f"; {free:.1f} of {total:.1f} GiB are free"
    return line


def release(device: torch.device) -> None:
    """Give back what is no longer used: patched models hold themselves in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Memory:
    """Device memory of one contender while others stay in memory beside it; 0 where the device does not count.

    Attributes:
        peak: the most that it had at one time.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device
        self._own = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the block allocates."""
        if self._device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.peak = max(self.peak, self._own + torch.cuda.max_memory_allocated(self._device) - before)
        self._own += torch.cuda.memory_allocated(self._device) - before
