"""Averages of gradients over the ranks of DDP, at the end of the backward and not beside it.

Ranks that hold parts of one document wait for each other in every layer, and kernels of long attention run for up to
a second. A reduction that begins between two of them holds multiprocessors until the last rank comes to its own. At
the end of the backward nothing runs beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

# Bytes a second. Links between GPUs reach several times as much; PCI Express and networks do not, and there reducing
# gradients beside the backward, as DDP does, hides more time than it takes.
LEAST_RATE = 60e9
_TRIED_BYTES = 2**27


def average_at_the_end(model: nn.Module) -> None:
    """Has DDP average all gradients when the last ones are there, once for a model; every rank must call this.

    It leaves other wrappers as they are, a communication hook that is there, and ranks whose links are slow.
    """
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size(model.process_group) == 1:
        return
    if least(not model._comm_hooks, model.process_group) and links_too_slow(model) is None:
        model.register_comm_hook(_Buckets(model.process_group), _averaged_with_the_last)


def reduces_by_hook(model: DistributedDataParallel) -> bool:
    """Returns whether a communication hook of the user's reduces the gradients of a model."""
    return any(hook is not _averaged_with_the_last for hook, _ in model._comm_hooks)


class _Buckets:
    """The buckets of a backward that wait for its last one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.waiting: list[tuple[Tensor, Future[Tensor]]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Empty: a copy of a DDP model averages by itself, and groups of processes cannot be copied."""
        return {}


# without annotations: DDP compares them with types, and here they are strings
def _averaged_with_the_last(state, bucket):
    """The communication hook: (state, ``dist.GradBucket``) -> the averaged bucket, in the future."""
    buffer = bucket.buffer()
    found: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    state.waiting.append((buffer, found))
    if bucket.is_last():
        for each, _ in state.waiting:
            average(each, state.group)
        for each, future in state.waiting:
            future.set_result(each)
        state.waiting.clear()
    return found


def average(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Averages a tensor over the ranks of a group, in place."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(x, dist.ReduceOp.AVG, group)
    else:
        dist.all_reduce(x.div_(dist.get_world_size(group)), group=group)


def links_too_slow(model: DistributedDataParallel) -> str | None:
    """Explains why a model should average beside the backward, None if its ranks are joined by fast links."""
    device = next(model.parameters()).device
    if device.type != "cuda" or (rate := least(_rate(model.process_group, device), model.process_group)) >= LEAST_RATE:
        return None
    return f"ranks exchange only {rate / 1e9:.0f} GB a second"


def least(value: float, group: dist.ProcessGroup | None) -> float:
    """The smallest value of all ranks."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group)
    return found.item()


def _rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes a second of a reduction over the ranks, the second one of two."""
    x = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device=device)
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        dist.all_reduce(x, group=group)
        end.record()
    end.synchronize()
    return _TRIED_BYTES / (start.elapsed_time(end) / 1e3)
