"""The scan of a recurrent layer over packed rows: delta rules and state-space scans whose state restarts per segment.

A function that scans [B, S, ...] (transformers' own: the kernel of ``fla`` or ``mamba_ssm`` where that library is
installed, plain torch elsewhere) and the arguments of a call -> :func:`request_of` -> :func:`scan`:

    our own kernels, if they serve the call  -> :mod:`.triton`, asked by the caller before all of this
    a library, if it passes a trial run      -> its kernel, with the segment boundaries
    else                                     -> the function itself, on batches of documents of similar length
    if the library fails there too           -> the plain torch beneath it, on the same batches

Our kernels come first, however long the documents are. ``flash_qla`` and ``mamba_ssm`` take less time on long ones
(benchmarks/RESULTS.md), but a step gains more from compiled layers and a CUDA graph, and these hold our kernels alone.
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
from torch.nn import functional as F

from torch_backend.ops.documents import COARSE, FINE, per_document
from torch_backend.ops.trial import current_device, in_own_thread, refusal
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)

Scan = Callable[..., Any]
_CHUNK = 64  # tokens of a document that fla's kernels take at once
TRIAL_LENGTHS = (70, 29)  # of the trial's documents: one is longer than a chunk, and a boundary lies inside one
# By norm. A state that leaks shows at a tenth or more, half-precision rounding at about one hundredth.
TRIAL_TOLERANCE = 0.05
_ABSENT = "it is not installed"


@dataclass(frozen=True)
class ScanRequest:
    """What a layer needs of a scan: enough to make a small case of it.

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

    @property
    def refused(self) -> str | None:
        """Why the library's kernel does not scan the row, None if it does."""
        return _refused(self, KERNELS[self.library])

    @property
    def divided(self) -> Scan:
        """What scans batches of documents: the function, or the plain torch beneath it where the library fails."""
        fails = _refused(self, per_document) not in (None, _ABSENT)
        return inspect.unwrap(self.function) if fails else self.function

    def __str__(self) -> str:
        if self.refused is None:
            return f"scan by {self.library}"
        if _refused(self, per_document) is None:
            return f"scan by {self.library} on batches of documents (not on the row: {self.refused})"
        return f"scan by plain torch on batches of documents (not {self.library}: {self.refused})"


def request_of(function: Scan, library: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ScanRequest:
    """The request that a call ``function(*args, **kwargs)`` makes of a scan.

    Args:
        function: takes tensors [B, S, ...] and scans along S from an empty state.
        library: the library whose kernel may scan the row, of ``KERNELS``.
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


def chosen(function: Scan, libraries: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ScanRequest:
    """The request for the first of the libraries that scans the row, and for the last one if none does."""
    requests = [request_of(function, library, args, kwargs) for library in libraries]
    return next((request for request in requests if request.refused is None), requests[-1])


def scan(request: ScanRequest, packed: PackedMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a request on the arguments that it was made from; the state restarts at every segment.

    Args:
        request: see :func:`request_of`.
        packed: the segments of the B * S tokens.
        args, kwargs: of the call.

    Returns:
        What ``request.function`` returns, states None.
    """
    if request.refused is None:
        return KERNELS[request.library](packed, request.function, args, kwargs)
    # On a GPU the launches of each batch dominate, so there are fewer batches, with more padding.
    return per_document(packed, request.divided, args, kwargs, sizes=COARSE if args[0].is_cuda else FINE)


def _fla(packed: PackedMetadata, function: Scan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """fla's kernels take one row. Without a list of their chunks they would read the boundaries back to make it."""
    rows, length = args[0].shape[:2]

    def flat(x: Any) -> Any:
        tokens = isinstance(x, Tensor) and x.shape[:2] == (rows, length)
        return x.reshape(1, rows * length, *x.shape[2:]) if tokens else x

    boundaries, chunks = packed.derived("chunks", _chunks)
    out, _ = function(
        *map(flat, args),
        **{name: flat(value) for name, value in kwargs.items()},
        cu_seqlens=boundaries,
        chunk_indices=chunks,  # of the gated delta rule
        use_graph=True,  # Kimi's: makes the list on the device
    )
    return out.view(rows, length, *out.shape[2:]), None


def _flash_qla(packed: PackedMetadata, function: Scan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FlashQLA's kernel takes one row too. Its context parallelism would read the boundaries back."""
    from flash_qla import chunk_gated_delta_rule

    given = dict(zip(parameters(function), args, strict=False)) | kwargs
    q, k, v, g, beta = (given[name].flatten(0, 1)[None] for name in ("query", "key", "value", "g", "beta"))
    normalise = bool(given.get("use_qk_l2norm_in_kernel"))
    out = chunk_gated_delta_rule(
        q, k, v, g.float(), beta, use_qk_l2norm_in_kernel=normalise, cu_seqlens=packed.cu_seqlens, auto_cp=False
    )[0]
    return out.view(args[0].shape[:2] + out.shape[2:]), None


def _mamba_ssm(packed: PackedMetadata, function: Scan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs, seq_idx=packed.seq_idx.view(args[0].shape[:2]))


KERNELS: dict[str, Callable[..., Any]] = {"flash_qla": _flash_qla, "fla": _fla, "mamba_ssm": _mamba_ssm}


def _chunks(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """The boundaries with one empty segment more, and (segment, chunk inside it) of every chunk, int32 [n, 2].

    Where only the device knows the lengths, n is what as many segments can need at most, and what is too many belongs
    to the empty segment, where kernels neither read nor write.
    """
    boundaries = torch.cat([packed.cu_seqlens, packed.cu_seqlens[-1:]])
    counts = (boundaries.diff() + (_CHUNK - 1)).div(_CHUNK, rounding_mode="floor")
    ends = counts.cumsum(0)
    if packed.lengths is None:
        n = (packed.tokens + (_CHUNK - 1) * len(counts)) // _CHUNK
    else:
        n = sum(-(-length // _CHUNK) for length in packed.lengths)
    places = torch.arange(n, device=packed.device)
    segment = torch.bucketize(places, ends, right=True).clamp_(max=len(counts) - 1)
    inside = (places - F.pad(ends, (1, 0)).index_select(0, segment)).masked_fill_(segment == len(counts) - 1, 0)
    return boundaries, torch.stack([segment, inside], 1).int()


@cache
def parameters(function: Scan) -> tuple[str, ...]:
    """The names of a scan's parameters."""
    return tuple(inspect.signature(function).parameters)


@cache
def _refused(request: ScanRequest, way: Callable[..., Any]) -> str | None:
    if find_spec(request.library) is None:
        return _ABSENT
    reason = refusal(partial(_error, request, way), TRIAL_TOLERANCE)
    if reason is not None:
        place = "batches of documents" if way is per_document else "the row"
        logger.warning(
            "%s is installed and does not scan %s here, which costs speed: %s", request.library, place, reason
        )
    return reason


@in_own_thread
def _error(request: ScanRequest, way: Callable[..., Any]) -> float:
    """Of the function run in a ``way`` on two documents against plain torch on each: the output and every gradient."""
    # With an empty segment, as batches of a fixed number of segments have.
    packed = PackedMetadata.from_lengths(TRIAL_LENGTHS, device=request.device, entries=len(TRIAL_LENGTHS) + 1)
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
        split = [x.split(TRIAL_LENGTHS, 1) if is_split else (x, x) for x, is_split in zip(values, tokens, strict=True)]
        return torch.cat([call(inspect.unwrap(request.function), document) for document in zip(*split, strict=True)], 1)

    with current_device(request.device):
        right, found = alone(), together()
        dout = torch.randn(right.shape, generator=generator).to(right)
        pairs = zip(*([out, *torch.autograd.grad(out, inputs, dout)] for out in (found, right)), strict=True)
        return max(float(((a - b).float().norm() / b.float().norm()).detach()) for a, b in pairs)


def _made(name: str, kind: str, what: Any, device: torch.device, generator: torch.Generator) -> Any:
    """A value for an argument of the trial: decays so slow that a state would last, strengths between 0 and 1."""
    if kind == "value":
        return what
    shape, dtype = what
    shape = (1, sum(TRIAL_LENGTHS), *shape) if kind == "tokens" else shape
    if name in ("g", "A"):
        value = -0.1 * torch.rand(shape, generator=generator)
    elif name == "beta":
        value = torch.rand(shape, generator=generator)
    else:
        value = torch.randn(shape, generator=generator)
    return value.to(device, dtype)
