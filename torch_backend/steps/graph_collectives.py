"""Communication between ranks around a step: counts of batches, averages at its end, what CUDA graphs hold of it.

DDP: the graphs hold no communication, and the gradients are averaged after the last microbatch of a step. So a rank may
replay a graph while another one runs as usual. FSDP2: its gathering and its reductions are recorded with the rest. Each
microbatch reduces its gradients, so that one graph serves any of them, and ranks record and replay together or not at
all: what NCCL does in a graph does not fit what it does outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from packing_core.errors import LayoutError

# Bytes a second. Links between GPUs reach several times as much; PCI Express and networks do not, and there reducing
# gradients beside the backward, as DDP does, hides more time than it takes.
LEAST_RATE = 60e9
_TRIED_BYTES = 2**27


def average_at_the_end(model: nn.Module) -> None:
    """Has DDP average all gradients when the last ones are there, once for a model; every rank must call this.

    Ranks that hold parts of one document wait for each other in every layer, and kernels of long attention run for up
    to a second. A reduction that begins between two of them holds multiprocessors until the last rank comes to its own.
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
    result: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    state.waiting.append((buffer, result))
    if bucket.is_last():
        for each, _ in state.waiting:
            average(each, state.group)
        for each, future in state.waiting:
            future.set_result(each)
        state.waiting.clear()
    return result


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
    reduced = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MIN, group)
    return reduced.item()


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


_AT_ONCE_BYTES = 2**28


Batch = Mapping[str, Any]


class Exchange:
    """No-op for one rank.

    Attributes:
        repeats: after a recording that failed, the batch can run as usual.
    """

    repeats = True

    @contextmanager
    def around(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a microbatch, ``last`` of its step."""
        yield

    def largest(self, *sizes: int) -> tuple[int, ...]:
        """The largest of each size over the ranks that record together."""
        return sizes

    def same(self, form: Any) -> bool:
        """Returns whether all ranks that record together have batches of this form."""
        number = crc32(repr(form).encode())
        return self.largest(number, -number) == (number, -number)

    def end_recording(self) -> None:
        """At the end of what a graph records."""


class Averaging(Exchange):
    """Averages the gradients of a DDP model over its ranks, in place of DDP.

    Where a rank's backward does not reach a parameter, its gradient counts as zero. A parameter that no rank reaches
    keeps none, as under ``find_unused_parameters=True``.

    DDP holds the nodes that accumulate gradients. They belong to the stream that it was built on, for which a recording
    may not wait. So forward and backward see other parameters, in the same memory.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        named = model.module.named_parameters()
        trained = [p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore]
        self.groups = [part for dtype in dict.fromkeys(p.dtype for p in trained) for part in _parts(trained, dtype)]
        self.aliases = {p: nn.Parameter(p.detach()) for p in trained}
        self.places = [
            (module, name, p)
            for module in model.module.modules()
            for name, p in module._parameters.items()
            if p in self.aliases
        ]

    @contextmanager
    def around(self, *, last: bool) -> Iterator[None]:
        for p, alias in self.aliases.items():
            alias.data = p.data  # which a checkpoint may have moved
            alias.requires_grad_(p.requires_grad)
            alias.grad, p.grad = p.grad, None
        try:
            for module, name, p in self.places:
                module._parameters[name] = self.aliases[p]
            with self.model.no_sync():
                yield
        finally:
            for module, name, p in self.places:
                module._parameters[name] = p
            for p, alias in self.aliases.items():
                p.grad, alias.grad = alias.grad, None
        if last:
            for parameters in self.groups:
                self._average(parameters)

    @torch.no_grad()
    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        group = self.model.process_group
        missing = [number for number, p in enumerate(parameters) if p.grad is None]
        reached = parameters[0].new_ones(len(parameters))
        for number in missing:
            reached[number].zero_()  # from the device: the host does not wait
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(x.flatten() for x in gradients), reached])
        average(flat, group)
        *means, reached = flat.split([*(x.numel() for x in gradients), len(parameters)])
        torch._foreach_copy_(gradients, [x.view_as(y) for x, y in zip(means, gradients, strict=True)])
        if missing:
            somewhere = reached.tolist()
            for number in missing:
                parameters[number].grad = gradients[number] if somewhere[number] else None


class Recorded(Exchange):
    """The gathering and reducing of an FSDP2 model, as parts of a graph."""

    repeats = False  # FSDP2 stands in the middle of a step then, and NCCL of what other ranks wait for

    def __init__(self, model: FSDPModule) -> None:
        self.model = model
        self.hosts = dist.new_group(backend="gloo")  # which waits for no GPU

    @contextmanager
    def around(self, *, last: bool) -> Iterator[None]:
        _reshard(self.model)  # an evaluation leaves weights gathered, and a graph gathers its own
        self.model.set_requires_gradient_sync(True)
        yield

    def largest(self, *sizes: int) -> tuple[int, ...]:
        maxima = torch.tensor(sizes)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, self.hosts)
        return tuple(maxima.tolist())

    def end_recording(self) -> None:
        """A recording ends on one stream, which waits for the others."""
        for stream in vars(self.model._get_fsdp_state()._comm_ctx).values():
            if isinstance(stream, torch.cuda.Stream):
                with torch.cuda.stream(stream):
                    recording = torch.cuda.is_current_stream_capturing()
                if recording:
                    torch.cuda.current_stream().wait_stream(stream)


def exchange_of(model: nn.Module, reason: str | None) -> tuple[Exchange, str | None]:
    """Returns the exchange between the ranks of a model around graphs, and the reason against graphs, if any.

    That is this rank's ``reason``, or that another rank has one, or what is found out here. Every rank must call this.
    """
    none = Exchange()
    if not isinstance(model, DistributedDataParallel | FSDPModule) or dist.get_world_size() == 1:
        return none, reason
    of_another = "another rank has a reason against one"
    group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
    if not least(reason is None, group):
        return none, reason or of_another
    if isinstance(model, DistributedDataParallel):
        if (slow := links_too_slow(model)) is not None:
            return none, f"gradients are reduced beside the backward, because {slow}"
        return Averaging(model), None
    exchange = none
    try:
        exchange = Recorded(model)
    except RuntimeError as error:
        reason = f"ranks cannot ask each other for the form of a batch, {error}".splitlines()[0]
    if not least(reason is None, group):
        return none, reason or of_another
    return exchange, None


def why_not_recorded(model: nn.Module) -> str | None:
    """Explains why steps of the ranks that train a model cannot be recorded as CUDA graphs, None if they can."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    if isinstance(model, FSDPModule):
        _reshard(model)
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        if any(p.device_mesh.size() != dist.get_world_size() or p.device_mesh.ndim > 1 for p in parameters):
            return "FSDP shards over some of the ranks, or over a mesh of several dimensions"
        if any(p.device.type != p.device_mesh.device_type for p in parameters):
            return "FSDP keeps weights on the host"
        return None
    if not isinstance(model, DistributedDataParallel):
        return "gradients are reduced over ranks during the backward"
    if reduces_by_hook(model):
        return "a communication hook of DDP reduces the gradients"
    if model.static_graph or model.mixed_precision is not None:
        return "DDP has a static graph, or a precision of its own"
    return None


def _reshard(model: Any) -> None:
    """Let no module of an FSDP2 model keep weights gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def place_of(x: Tensor) -> int:
    """Returns the address of a tensor, or of the first one that it stands for, such as this rank's part of it."""
    while is_traceable_wrapper_subclass(x):
        x = getattr(x, x.__tensor_flatten__()[0][0])
    return x.data_ptr()


def _parts(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> Iterator[list[nn.Parameter]]:
    """The parameters of a dtype, as many at a time as are averaged at once."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.dtype == dtype:
            part.append(parameter)
            if sum(p.nbytes for p in part) >= _AT_ONCE_BYTES:
                yield part
                part = []
    if part:
        yield part


class Counts:
    """Counts of batches, which ranks compare on the host before a model runs in which they wait for each other.

    Every forward of a sharded model gathers weights from all ranks, and DDP sends buffers. A rank that runs a batch
    more than the others would wait for them until the time limit. So a rank that has fewer runs its last one again,
    which counts nothing. The group is the default one if None.
    """

    def __init__(self, group: dist.ProcessGroup | None, world: int) -> None:
        self.group = group
        self.world = world

    @cached_property
    def _hosts(self) -> Any:
        """A group of the same ranks that waits for no GPU."""
        if dist.get_backend(self.group) == "gloo":
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks."""
        maxima = torch.tensor(values)
        if self.world > 1:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, self._hosts)
        return maxima.tolist()

    def evened(self, microbatches: Sequence[Batch], emptied: Callable[[Batch], Batch]) -> list[Batch]:
        """Microbatches of a step, followed by as many without targets as other ranks have more.

        Raises:
            LayoutError: a rank has none; on every rank, as whatever ``emptied`` raises.
        """
        most, negative = self.largest(len(microbatches), -len(microbatches))
        if not negative:
            raise LayoutError("a rank has no microbatch with labels, and others wait for it: pass each at least one")
        if most == -negative:
            return [*microbatches]
        return [*microbatches, *[emptied(microbatches[-1])] * (most - len(microbatches))]

    def together(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yields batches until every rank has had its last one, and whether each counts.

        Raises:
            LayoutError: a rank has none, and others have some; on every rank.
        """
        source, last = iter(batches), None
        while True:
            batch = next(source, None)
            some, idle = self.largest(batch is not None, batch is None and last is None)
            if not some:
                return
            if idle:
                raise LayoutError("a rank has no batch to evaluate, and others have: pass each at least one")
            last = last if batch is None else batch
            assert last is not None
            yield last, batch is not None
