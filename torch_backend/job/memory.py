"""Device memory of a training job: an estimate before the first step, and the measured use of each run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from packing_core.training.job import TrainJob
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.job.ranks import Ranks

_GIB = 2**30


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def states_bytes(model: torch.nn.Module, job: TrainJob) -> int:
    """Bytes of weights, gradients and AdamW's two moments, and of float32 copies of the weights."""
    weights = weights_bytes(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    if job.options.master_weights:
        return weights + gradients + sum(p.numel() for p in trained) * 3 * 4
    return weights + gradients + 2 * gradients


def activation_bytes(model: Any, job: TrainJob) -> int:
    """Bytes of a packed row's activations, roughly.

    In 16 bits a layer keeps 34 bytes for a token and unit of width (Korthikanti et al. 2022, arXiv:2205.05198, equation
    1, without the scores that attention kernels do not keep); with gradient checkpointing it keeps its input, and one
    layer at a time the rest.
    """
    config = causal_lm(model).config.get_text_config()
    layers, width = config.num_hidden_layers, config.hidden_size
    tokens = job.schedule.plans[0].capacity
    units = tokens * width * (2 if job.options.precision == "float32" else 1)
    return units * (2 * layers + 34 if job.gradient_checkpointing else 34 * layers)


def memory_line(model: Any, job: TrainJob, ranks: Ranks, device: torch.device) -> str:
    """Compares the memory that a process of the job needs with the memory of the device."""
    weights, activations = weights_bytes(model), activation_bytes(model, job) / _GIB
    others = states_bytes(model, job) - weights
    if job.strategy in ("fsdp", "zero3"):
        states = (weights + others) / ranks.world / _GIB
    else:
        states = (weights + others / (ranks.world if job.strategy == "zero2" else 1)) / _GIB
    there = ""
    if device.type == "cuda":
        free, total = (size / _GIB for size in torch.cuda.mem_get_info(device))
        there = f"; {free:.1f} of {total:.1f} GiB are free"
    return (
        f"memory: {states:.2f} GiB of weights, gradients and optimizer states, and about {activations:.2f} GiB of "
        f"activations{there}"
    )


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
