"""Probes whether an implementation works here, by a tiny case forward and backward, once per configuration and process.

That a library imports says little: its wheel may hold no kernel for this GPU or this torch, and an option may be
accepted and ignored. So what an implementation can do is what a run on the device shows:

    request --same options, small shapes--> the implementation --compare--> plain attention --> None or the reason
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor

from torch_backend.ops.attention.reference import REFERENCE
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.ops.operators import INTERPRETED
from torch_backend.ops.trial import current_device, in_own_thread, refusal
from torch_backend.segments import PackedMetadata

# Shorter than, equal to and longer than a tile of 64, with a boundary inside a tile; two zero-length segments follow,
# and the longest is rounded up.
_LENGTHS = (5, 64, 1, 70, 12)
_PARENTS = (-1, 0, 0, 2, 1)  # of the same segments, where some continue others
_MANY = 100 * (1, 2, 3)  # more documents than some kernels count
_OUTLIERS = slice(2, 30)  # tokens of queries and keys, in the first two documents
_OUTLIER = 256.0  # its square, a term of a score, is beyond float16, and bfloat16 drops what is added to it
_EMPTY = 2
_MAX_SEQLEN = 96
_WINDOW = 7
_MORE_KEYS = 75  # before the queries of each segment
_SPAN = 21  # tokens that see both ways
# A mask, an option or a gradient that is wrong shows at order one; half-precision rounding at about one hundredth.
_TOLERANCE = 0.05


_instances: dict[str, Probed] = {}


class Probed:
    """Base of the implementations whose support is found by a trial run.

    Subclasses say in ``refuses`` what they know without a run, and define ``__call__``.
    """

    host_lengths = False
    own = False  # this project's: its suite has hundreds of documents and outliers, and its trial, interpreted, few
    key: str  # names the instance

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.key = f"{cls.__qualname__} {len(_instances)}"
        _instances[made.key] = made
        return made

    def refuses(self, request: AttentionRequest) -> str | None:
        """Explains why the request cannot run, judged by its numbers alone; None if they allow it."""
        raise NotImplementedError

    def supports(self, request: AttentionRequest) -> str | None:
        return self.refuses(request) or _failure(
            self.key,
            request.dtype,
            request.device,
            request.heads // request.kv_heads,
            # kernels of our own are compiled for the number of heads: those of the trial are those of the call
            request.kv_heads if self.own and not INTERPRETED else min(request.kv_heads, 2),
            request.head_dim,
            request.value_dim,
            request.requires_grad,
            request.causal,
            request.window is not None,
            request.softcap,
            request.sinks,
            request.alibi,
            request.key_tokens is not None,
            request.parents,
            request.both_ways,
            torch.are_deterministic_algorithms_enabled(),
        )

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        raise NotImplementedError


# torch.compile runs it while tracing and keeps the answer, without a break. Its arguments must be constants (2.11): the
# key stands for the implementation.
@torch.compiler.assume_constant_result
def _failure(key: str, *configuration: Any) -> str | None:
    return _outcome(_instances[key], *configuration)


@cache
def _outcome(
    implementation: Probed,
    dtype: torch.dtype,
    device: torch.device,
    group: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    requires_grad: bool,
    causal: bool,
    windowed: bool,
    softcap: float | None,
    sinks: bool,
    alibi: bool,
    more_keys: bool,
    parents: bool,
    both_ways: bool,
    deterministic: bool,
) -> str | None:
    lengths = _LENGTHS if implementation.own else _LENGTHS + _MANY
    request = AttentionRequest(
        tokens=sum(lengths),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        device=device,
        segments=len(lengths) + _EMPTY,
        max_seqlen=_MAX_SEQLEN,
        requires_grad=requires_grad,
        causal=causal,
        window=_WINDOW if windowed else None,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        scale=head_dim**-0.5,
        key_tokens=sum(lengths) + len(lengths) * _MORE_KEYS if more_keys else None,
        parents=parents,
        both_ways=both_ways,
    )
    return refusal(partial(_errors, implementation, request, lengths), _TOLERANCE)


@in_own_thread
def _errors(implementation: Probed, request: AttentionRequest, lengths: tuple[int, ...]) -> list[float]:
    """The errors of the output and of each gradient, as shares of its largest value."""
    packed = PackedMetadata.from_lengths(
        lengths,
        device=request.device,
        entries=request.segments,
        max_seqlen=_MAX_SEQLEN,
        parents=[*_PARENTS, *[-1] * (len(lengths) - len(_PARENTS))] if request.parents else None,
    )
    if request.key_tokens is not None:
        packed = PackedMetadata.of_last_tokens(lengths, [n + _MORE_KEYS for n in lengths], device=request.device)
    if request.both_ways:
        numbers = torch.arange(request.tokens, device=request.device) // _SPAN  # some cross the end of a segment
        packed = packed.with_spans(torch.where(numbers % 2 == 0, numbers, -1))

    def tried(q: Tensor, k: Tensor, v: Tensor, *per_head: Tensor | None) -> Tensor:
        return implementation(AttentionInputs(q, k, v, packed, *per_head), request)

    def plain(q: Tensor, k: Tensor, v: Tensor, *per_head: Tensor | None) -> Tensor:
        plainly = REFERENCE(AttentionInputs(q.float(), k.float(), v.float(), packed, *per_head), request)
        return plainly.to(request.dtype)

    with current_device(request.device):
        both = [_output_and_gradients(each, request, outliers=not implementation.own) for each in (tried, plain)]
        pairs = zip(*both, strict=True)
        return [float((found - right).abs().max() / right.abs().max()) for found, right in pairs]


def _output_and_gradients(
    function: Callable[..., Tensor], request: AttentionRequest, *, outliers: bool
) -> list[Tensor]:
    """In float32, of inputs that are the same in every call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(request.device, request.dtype)

    keys = request.tokens if request.key_tokens is None else request.key_tokens
    q, k = normal(request.tokens, request.heads, request.head_dim), normal(keys, request.kv_heads, request.head_dim)
    v = normal(keys, request.kv_heads, request.value_dim)
    dout = normal(request.tokens, request.heads, request.value_dim)
    sinks = normal(request.heads) if request.sinks else None
    slopes = torch.linspace(0.1, 0.5, request.heads, device=request.device) if request.alibi else None

    def run() -> Tensor:
        queries, keys = (_with_outliers(x) if outliers else x for x in (q, k))
        return function(queries, keys, v, sinks, slopes)

    if not request.requires_grad:
        with torch.no_grad():
            return [run().float()]
    inputs = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    with torch.enable_grad():
        out = run()
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, inputs, dout))]


def _with_outliers(x: Tensor) -> Tensor:
    """Replaces the first channel by a constant, large at a few tokens: rounding would be all of its gradient."""
    first = torch.zeros_like(x[..., :1])
    first[_OUTLIERS] = _OUTLIER
    return torch.cat([first, x[..., 1:]], -1)
