"""The ranks that share the rows of a batch, and how they do."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from packing_core.errors import LayoutError, PackingError, UnsupportedError
from packing_core.planning.context import context_plan
from packing_core.planning.cost import Cost, cost_of
from torch_backend.context_parallel.rank_attention import METHODS
from torch_backend.context_parallel.share import RankShare

AUTO = "auto"
DIFFERENT_BATCHES = (
    "the ranks of a context-parallel group have different batches: give all of them the same rows, by a sampler over "
    "the other dimensions of the mesh alone"
)
_WEIGHTS = 1_000_003  # of tokens in their checksum repeat after so many


@dataclass(frozen=True)
class ContextGroup:
    """A context-parallel group. Copies are the group itself; a process that loads a pickled one gets None.

    Attributes:
        mesh: of one dimension.
        method: how attention crosses ranks: "keys", "heads", or "auto" for the one that sends less.
        cost: what tokens and pairs cost.
        contiguous: whether each rank has one piece of a document.
    """

    mesh: DeviceMesh
    method: str
    cost: Cost
    contiguous: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextGroup:
        return self  # processes are not copied with a model

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # it is not of the ranks that load it

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.mesh.get_group()

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return int(self.mesh.size())

    def share(self, lengths: Sequence[int], tokens: Tensor, *others: Tensor) -> RankShare:
        """Returns the part of a batch that this rank holds; the batch must be the same on all ranks.

        Args:
            lengths: tokens of each document.
            tokens: of the whole batch, on the device that the ranks exchange on.
            others: further integers of each token, which are compared too.

        Raises:
            PackingError: there are fewer tokens than ranks.
            LayoutError: the ranks have different batches. On a GPU an assertion on the device fails instead, because
                nothing is read back.
        """
        plan = context_plan(lengths, self.ranks, cost=self.cost, contiguous=self.contiguous)
        self.require_same(lengths, tokens, *others, message=DIFFERENT_BATCHES)
        return RankShare(plan, dist.get_rank(self.group), self.group, tokens.device)

    def require_same(self, numbers: Sequence[float], *values: Tensor, message: str) -> None:
        """Raise if the ranks have different numbers or values, by one reduction of a checksum of each part.

        Args:
            numbers: on the host.
            values: integers on the device that the ranks exchange on, as many tensors on every rank.
            message: of the error.

        Raises:
            LayoutError: they differ. On a GPU an assertion on the device fails instead, because nothing is read back.
        """
        flat = [x.reshape(-1).long() for x in values]
        weights = torch.arange(max(map(len, flat)), device=flat[0].device) % _WEIGHTS + 1
        of_numbers = zlib.crc32(np.asarray(numbers, np.float64).tobytes())
        # filled on the device: a tensor made of a number is copied there, for which the host waits
        number = torch.full((), of_numbers, device=weights.device)
        sums = torch.stack([number, *((x * weights[: len(x)]).sum() for x in flat)])
        both = torch.cat([sums, -sums])
        lowest = both.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.group)
        same = (lowest == both).all() & (lowest[: len(sums)] == -lowest[len(sums) :]).all()
        if same.is_cuda:
            torch._assert_async(same, message)
        elif not same:
            raise LayoutError(message)


def context_group(mesh: Any, config: Any, *, method: str = AUTO, recurrent: bool = False) -> ContextGroup | None:
    """The group of a mesh; None for a mesh of one rank.

    Args:
        mesh: a ``DeviceMesh`` of one dimension.
        config: of the model, for the cost of tokens and pairs.
        method: see :class:`ContextGroup`.
        recurrent: whether the model has recurrent layers. Without attention beside them, each rank has one piece of a
            document, so that convolutions fetch least; with it, two, which have as many tokens and as many pairs.

    Raises:
        PackingError: an unknown method, or no mesh of one dimension.
        UnsupportedError: the mesh does not divide the world.
    """
    if method not in (AUTO, *METHODS):
        raise PackingError(f"context_method is {method!r}: pass {AUTO}, {' or '.join(METHODS)}")
    if not isinstance(mesh, DeviceMesh):
        raise PackingError(f'mesh is a {type(mesh).__name__}: pass one dimension of a DeviceMesh, as in mesh["cp"]')
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ())
        raise PackingError(
            f'the mesh has {mesh.ndim} dimensions ({names}): pass the one over which rows are cut, as in mesh["cp"]'
        )
    world = dist.get_world_size()
    if world % mesh.size():
        raise UnsupportedError(
            f"a mesh of {mesh.size()} ranks does not divide the {world} ranks of the job: "
            "every rank belongs to one group"
        )
    if mesh.size() == 1:
        return None
    cost = cost_of([config])
    attends = bool(cost.squares or cost.windows)
    return ContextGroup(mesh, method, cost, contiguous=recurrent and not attends)


@contextmanager
def draws_of_rank(share: RankShare) -> Iterator[None]:
    """Inside, the rank draws other random numbers than the other ranks, though all may have been seeded alike.

    By themselves such ranks would drop the same channels of the first token that each holds, of the second and so on,
    and these may be tokens of one document. Afterwards the generator of the CPU has advanced by one draw on every rank,
    and that of the device by none, so samplers that draw from them still agree.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + share.rank
    with torch.random.fork_rng([share.device] if share.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
