"""Several processes in one training job: their group, the model that FSDP2 shards over them, whole tensors.

The environment variables of torchrun say how many there are; a process alone has rank 0 of 1 and no group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from packing_core.training.timing import Clock
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import DecoderLayer

_TIMEOUT = timedelta(minutes=30)  # while one rank writes a checkpoint, the others wait


class Ranks(NamedTuple):
    """Identifies this process among the ranks.

    Attributes:
        rank: its number, from 0; rank 0 writes.
        world: how many there are.
        local: its number on this machine.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @staticmethod
    def from_environment() -> Ranks:
        rank, world, local = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return Ranks(int(rank or 0), int(world or 1), int(local or rank or 0))

    @contextmanager
    def joined(self, device: torch.device, *, high_priority: bool = False) -> Iterator[None]:
        """Inside, the processes can reduce over each other: by NCCL on GPUs, by gloo elsewhere.

        A group that exists already is used, and kept.

        Args:
            device: of this process.
            high_priority: NCCL's kernels begin as soon as a multiprocessor is free, and not behind one of attention
                that was launched before, which takes as long as its documents are long.
        """
        if self.world == 1 or dist.is_initialized():
            yield
            return
        if high_priority:
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        yield  # after an error the group is left as it is: others may be waiting in it
        dist.barrier()  # none ends before rank 0 has written
        dist.destroy_process_group()

    def groups(self, size: int) -> Ranks:
        """Identifies the group of ``size`` neighbouring ranks that this one belongs to, among all groups."""
        return self._replace(rank=self.rank // size, world=self.world // size)

    def everyones(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        gathered = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(gathered, value)
        return gathered


class Process(NamedTuple):
    """This process of a training job.

    Attributes:
        device: what it computes on.
        ranks: which of the ranks it is.
        clock: times its steps.
    """

    device: torch.device
    ranks: Ranks
    clock: Clock


def context_mesh(process: Process, size: int) -> DeviceMesh | None:
    """Returns the ``size`` neighbouring ranks that cut their rows together; None for one."""
    if size == 1:
        return None
    shape = process.ranks.world // size, size
    return init_device_mesh(process.device.type, shape, mesh_dim_names=("groups", "cp"))["cp"]


def shard(model: nn.Module, process: Process) -> None:
    """Shard a model over all ranks by FSDP2: every decoder layer, and what is left."""
    mesh = init_device_mesh(process.device.type, (process.ranks.world,))
    layers = [module for module in causal_lm(model).get_decoder().modules() if isinstance(module, DecoderLayer)]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)


def whole(x: Tensor) -> Tensor:
    """A tensor that may be sharded, gathered from all ranks, which must all ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that FSDP2 or ZeRO-3 may have sharded, gathered to the host by all ranks."""
    if not any(hasattr(weight, "ds_id") for weight in weights.values()):
        return {name: whole(weight.detach()).cpu() for name, weight in weights.items()}
    from deepspeed.runtime.zero import GatheredParameters

    gathered = {}
    for name, weight in weights.items():
        with GatheredParameters([weight]):
            gathered[name] = weight.detach().to("cpu", copy=True)
    return gathered


def like(x: Tensor, sharded: Tensor) -> Tensor:
    """A whole tensor, split as another one is."""
    if not isinstance(sharded, DTensor) or not x.ndim:  # a step counter belongs to every rank
        return x
    return distribute_tensor(x.to(sharded.device), sharded.device_mesh, sharded.placements)
