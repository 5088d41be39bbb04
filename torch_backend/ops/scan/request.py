"""The request of a scan call, and a trial on a row of documents of whether a library computes it correctly here.

A function that scans [B, S, ...] (transformers' own: the kernel of a library where that is installed, plain torch
elsewhere) and the arguments of a call -> :func:`request_of` -> :func:`refused`, once for each way of running it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.document_batches import per_document
from torch_backend.ops.trial import current_device, in_own_thread, refusal
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)

Scan = Callable[..., Any]
# (segments, function, args and kwargs of a call) -> what the function returns, states None
Way = Callable[[PackedMetadata, Scan, tuple[Any, ...], dict[str, Any]], Any]
TRIAL_LENGTHS = (70, 29)  # of the trial's documents: one is longer than a chunk, and a boundary lies inside one
# Those of a library's trial as (documents, length): with more documents than some kernels count.
_GROUPS = (*((1, length) for length in TRIAL_LENGTHS), (100, 1), (100, 2), (100, 3))
_LENGTHS = tuple(length for count, length in _GROUPS for _ in range(count))
_ENDS, _END = slice(40, 42), -20.0  # tokens whose decay ends a state: half precision cannot divide by exp(-20)
# By norm. A state that leaks shows at a tenth or more, half-precision rounding at about one hundredth.
TRIAL_TOLERANCE = 0.05
ABSENT = "it is not installed"


@dataclass(frozen=True)
class ScanRequest:
    """The request of a layer to a scan: enough to make a small case of it.

    Attributes:
        function: what the modeling file calls.
        library: whose kernel may scan the row.
        device: of the tensors.
        positional: how many of the arguments are.
        arguments: name, kind and what is known of each: of "tokens" [B, S, ...] the shape of one and the dtype, of any
            other "tensor" its shape and dtype, of a "value" itself.
    """

    function: Scan
    library: str
    device: torch.device
    positional: int
    arguments: tuple[tuple[str, str, Any], ...]


def request_of(function: Scan, library: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ScanRequest:
    """The request that a call ``function(*args, **kwargs)`` makes of a scan.

    Args:
        function: takes tensors [B, S, ...] and scans along S from an empty state.
        library: the library whose kernel may scan the row.
        args, kwargs: of the call, without boundaries.
    """
    row = args[0].shape[:2]

    def form(name: str, value: Any) -> tuple[str, str, Any]:
        if not isinstance(value, Tensor):
            return name, "value", tuple(value) if isinstance(value, list) else value  # hashable
        if value.shape[:2] == row:
            return name, "tokens", (value.shape[2:], value.dtype)
        return name, "tensor", (value.shape, value.dtype)

    named = [*zip(parameters(function), args, strict=False), *kwargs.items()]
    arguments = tuple(form(name, value) for name, value in named)
    return ScanRequest(function, library, args[0].device, len(args), arguments)


@cache
def parameters(function: Scan) -> tuple[str, ...]:
    """The names of a scan's parameters."""
    return tuple(inspect.signature(function).parameters)


@cache
def refused(request: ScanRequest, way: Way, limits: str | None = None) -> str | None:
    """Explains why the request's library does not run it in this way, None if it does. The first answer is kept.

    Args:
        request: of the call.
        way: how the library would serve it.
        limits: why it cannot, if that is known without a trial.
    """
    if find_spec(request.library) is None:
        return ABSENT
    if limits is not None:
        return limits
    reason = refusal(partial(_errors, request, way), TRIAL_TOLERANCE)
    if reason is not None:
        place = "batches of documents" if way is per_document else "the row"
        logger.warning(
            "%s is installed and does not scan %s here, which costs speed: %s", request.library, place, reason
        )
    return reason


@in_own_thread
def _errors(request: ScanRequest, way: Way) -> list[float]:
    """Compares the function run in a ``way`` on documents with plain torch on each: output and every gradient."""
    # With an empty segment, as batches of a fixed number of segments have.
    packed = PackedMetadata.from_lengths(_LENGTHS, device=request.device, entries=len(_LENGTHS) + 1)
    if way is not per_document:
        packed.lengths = None  # as in compiled layers
    generator = torch.Generator().manual_seed(0)
    values = [_made(*argument, request.device, generator) for argument in request.arguments]
    inputs = [x.requires_grad_() for x in values if isinstance(x, Tensor)]

    def call(function: Scan, values: Sequence[Any]) -> Tensor:
        keywords = [name for name, *_ in request.arguments[request.positional :]]
        named = dict(zip(keywords, values[request.positional :], strict=True))
        result = function(*values[: request.positional], **named)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def together() -> Tensor:
        return call(lambda *args, **kwargs: way(packed, request.function, args, kwargs), values)

    def alone() -> Tensor:
        tokens = [kind == "tokens" for _, kind, _ in request.arguments]
        sizes = [count * length for count, length in _GROUPS]
        parts = [x.split(sizes, 1) if each else [x] * len(sizes) for x, each in zip(values, tokens, strict=True)]
        outputs = []
        for (count, length), *group in zip(_GROUPS, *parts, strict=True):
            batch = [x.reshape(count, length, *x.shape[2:]) if each else x for x, each in zip(group, tokens)]
            outputs.append(call(inspect.unwrap(request.function), batch).flatten(0, 1))
        return torch.cat(outputs)[None]

    with current_device(request.device):
        right, found = alone(), together()
        dout = torch.randn(right.shape, generator=generator)
        pairs = zip(*([out, *torch.autograd.grad(out, inputs, dout.to(out))] for out in (found, right)), strict=True)
        return [float(((a - b).float().norm() / b.float().norm()).detach()) for a, b in pairs]


def _made(name: str, kind: str, what: Any, device: torch.device, generator: torch.Generator) -> Any:
    """A value for an argument of the trial: decays so slow that a state would last, strengths between 0 and 1."""
    if kind == "value":
        return what
    shape, dtype = what
    shape = (1, sum(_LENGTHS), *shape) if kind == "tokens" else shape
    if name in ("g", "A"):
        value = -0.1 * torch.rand(shape, generator=generator)
        if kind == "tokens":
            value[:, _ENDS] = _END
    elif name == "beta":
        value = torch.rand(shape, generator=generator)
    else:
        value = torch.randn(shape, generator=generator)
    return value.to(device, dtype)
