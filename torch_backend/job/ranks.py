"""Several processes in one training job: their group, the model around which gradients are reduced, whole tensors.

The environment variables of torchrun say how many there are; a process alone has rank 0 of 1 and no group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

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
    def joined(self, device: torch.device) -> Iterator[None]:
        """Inside, the processes can reduce over each other: by NCCL on GPUs, by gloo elsewhere.

        A group that exists already is used, and kept.
        """
        if self.world == 1 or dist.is_initialized():
            yield
            return
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        yield  # after an error the group is left as it is: others may be waiting in it
        dist.barrier()  # none ends before rank 0 has written
        dist.destroy_process_group()

    def wrapped(self, model: nn.Module, strategy: Literal["ddp", "fsdp"], device: torch.device) -> nn.Module:
        """The model as its ranks train it: FSDP2 shards every decoder layer and what is left, in place."""
        if self.world == 1:
            return model
        if strategy == "ddp":
            return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        mesh = init_device_mesh(device.type, (self.world,))
        layers = [module for module in causal_lm(model).get_decoder().modules() if isinstance(module, DecoderLayer)]
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
        return model

    def everyones(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found


ALONE = Ranks()


def unwrapped(model: Any) -> Any:
    """The model inside of DDP; FSDP2 stands around none."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def whole(x: Tensor) -> Tensor:
    """A tensor that may be sharded, gathered from all ranks, which must all ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, sharded: Tensor) -> Tensor:
    """A whole tensor, split as another one is."""
    if not isinstance(sharded, DTensor) or not x.ndim:  # a step counter belongs to every rank
        return x
    return distribute_tensor(x.to(sharded.device), sharded.device_mesh, sharded.placements)
