"""The inputs of layers on the host, from their forward to their backward: ``memory="offload"``.

    the forward of a layer -> its input is copied to page-locked memory of the host, and freed
    the backward of a layer -> the input comes back, while the layer above it computes its gradients

Where the host cannot hold an input of every layer, as for one long document, layers share inputs in groups: that of the
first one is kept, and the others are computed again from it when the backward comes to the group, one more forward of
these layers. Only compiled layers get this treatment, whose backward reads no other large tensor of the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from packing_core.errors import UnsupportedError

_HIDDEN = object()  # stands for a layer's input among its arguments


def why_not_shared(model: nn.Module) -> str | None:
    """Explains why layers of a model cannot share inputs on the host, None if they can."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "FSDP2 gathers weights in a forward, and layers that share inputs run one in the backward"
    return None


class _LayerForward(NamedTuple):
    """The forward of one layer, to be run again.

    Attributes:
        leader: number of the layer whose input is on the host, from which this one's is computed.
        run: the layer, of its input.
    """

    leader: int
    run: Callable[[Tensor], Tensor]


class _InputPlace(NamedTuple):
    """Locates a layer's input in memory, to find it among saved tensors."""

    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    contiguous: bool

    @classmethod
    def of(cls, x: Tensor) -> _InputPlace:
        return cls(x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_contiguous())

    def holds(self, x: Tensor) -> bool:
        """Returns whether a tensor is this input, or a view of all of it in the same order."""
        if x.data_ptr() != self.address or x.dtype != self.dtype or x.numel() != self.shape.numel():
            return False
        return (x.shape, x.stride()) == (self.shape, self.stride) or (self.contiguous and x.is_contiguous())


class Host:
    """The inputs of layers in page-locked memory of the host.

    Copies run on a stream of their own, beside the layers. All that they read and write keeps its address from step to
    step, so a CUDA graph records them with the rest. The input of a layer is freed when the next layer but one begins,
    and comes back while the layer above it computes its gradients.

    Attributes:
        group: layers that share an input on the host.
        buffers: that input of each group.
    """

    def __init__(self) -> None:
        self.group = 1
        self.buffers: list[Tensor] = []
        self.stream: torch.cuda.Stream | None = None
        self.begin()

    def begin(self) -> None:
        """Begin with the first layer of a forward."""
        self.calls: list[_LayerForward] = []
        self.leaders: dict[int, int] = {}  # number of a layer -> its buffer
        self.saved: Counter[int] = Counter()  # number of a layer -> how often its backward reads its input
        self.leaving: list[tuple[Tensor, Any]] = []  # copies to the host that nobody waited for
        self.coming: dict[int, tuple[Tensor, Any]] = {}  # from the host
        self.here: dict[int, Tensor] = {}  # inputs of layers whose backward comes next
        self.last: Callable[[], Tensor | None] = lambda: None  # what the layer before returned
        self.version = 0

    @property
    def held(self) -> int:
        """Returns the bytes that are page-locked."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``call`` of a layer, whose first tensor is kept on the host for its backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden = next(x for x in chain(args, kwargs.values()) if isinstance(x, Tensor))
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            number = self._enter(call, hidden, args, kwargs)
            pack = partial(self._leave, number, _InputPlace.of(hidden))
            del hidden
            with saved_tensors_hooks(pack, self._return):
                result = call(*args, **kwargs)
            out = _first(result)
            self.last, self.version = ref(out), out._version
            return result

        return run

    def _enter(self, call: Callable[..., Any], hidden: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Note the call of a layer, and return its number."""
        number = len(self.calls)
        # something between two layers, such as images that are added: nothing leads from one input to the next
        follows = self.last() is hidden and hidden._version == self.version
        before = self.calls[-1].leader if self.calls else number
        leader = before if follows and number - before < self.group else number
        given = [_HIDDEN if x is hidden else x for x in args]
        named = {name: _HIDDEN if x is hidden else x for name, x in kwargs.items()}
        kind, needs = hidden.device.type, hidden.requires_grad
        cast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

        def again(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_(needs)  # as in the forward, so that its compiled graph runs
            with torch.enable_grad(), cast:
                result = call(
                    *(x if value is _HIDDEN else value for value in given),
                    **{name: x if value is _HIDDEN else value for name, value in named.items()},
                )
            return _first(result).detach()

        self.calls.append(_LayerForward(leader, again))
        if leader == number:
            self._send(number, hidden.detach())
        return number

    def _leave(self, number: int, place: _InputPlace, x: Tensor) -> Any:
        if not place.holds(x):
            return x
        self.saved[number] += 1
        return _Kept(number, x.shape)

    def _send(self, number: int, x: Tensor) -> None:
        buffer = self.leaders[number] = len(self.leaders)
        if buffer < len(self.buffers) and self.buffers[buffer].shape != x.shape:
            del self.buffers[buffer:]  # rows of another length
        if buffer == len(self.buffers):
            self.buffers.append(_page_locked(x))
        while len(self.leaving) > 1:
            self._settle()
        self.leaving.append((x, self._copy(self.buffers[buffer], x)))

    def _return(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept
        number = kept.number
        while self.leaving:
            self._settle()
        if number not in self.here:
            self._restore(number)
        self.saved[number] -= 1
        found = self.here[number] if self.saved[number] else self.here.pop(number)
        leader = self.calls[number].leader
        if leader == number > 0:  # the group below is next
            below = self.calls[number - 1].leader
            if below in self.leaders and below not in self.coming:
                self.coming[below] = self._fetch(below)
        return found.view(kept.shape)

    def _restore(self, number: int) -> None:
        """Bring back the inputs of a group's layers up to one, whose backward comes first."""
        leader = self.calls[number].leader
        x, copied = self.coming.pop(leader) if leader in self.coming else self._fetch(leader)
        _wait(copied)
        self.here[leader] = x
        for each in range(leader, number):
            self.here[each + 1] = x = self.calls[each].run(x)

    def _settle(self) -> None:
        """Let the layers wait for the oldest copy to the host, before what it read is freed."""
        _, copied = self.leaving.pop(0)
        _wait(copied)

    def _fetch(self, number: int) -> tuple[Tensor, Any]:
        there = self.buffers[self.leaders[number]]
        here = torch.empty_like(there, device=self.device)
        return here, self._copy(here, there)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copies beside the layers, and returns the event of its end; at once without a GPU."""
        self.device = (source if target.device.type == "cpu" else target).device
        if self.device.type != "cuda":
            target.copy_(source.view_as(target))
            return None
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source.view_as(target), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return copied


class _Kept(NamedTuple):
    """Stands for a layer's input, or a view of it, among saved tensors."""

    number: int  # of the layer
    shape: torch.Size


def _first(result: Any) -> Tensor:
    """The hidden state among the results of a layer."""
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found


def _wait(copied: Any) -> None:
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)


def _page_locked(x: Tensor) -> Tensor:
    try:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    except RuntimeError as error:
        size = x.numel() * x.element_size() / 2**30
        raise UnsupportedError(
            f'memory="offload" needs {size:.2f} GiB of page-locked memory for each group of layers, and the host has '
            'no more: pass memory="full", or shorter rows'
        ) from error
