"""The table of attention implementations, and the one loop that selects among them.

A request -> the names to ask, in order (:mod:`.order` for "auto") -> the first whose ``supports`` returns None. An
implementation is one object in a file of its own: a new one is a new file and a line in ``IMPLEMENTATIONS``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from packing_core.errors import UnsupportedError
from torch_backend.ops import tables
from torch_backend.ops.attention.order import CPU, CUDA, last_resort, order
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest, Implementation, describe
from torch_backend.segments import PackedMetadata, host_lengths

logger = logging.getLogger(__name__)

TRIED_LAST = "tried last"  # how the reason begins of what would serve, but costs the square of a document

# name -> where its object lives; imported on first use
IMPLEMENTATIONS = {
    "flash4": "torch_backend.ops.attention.flash:FLASH4",
    "flash3": "torch_backend.ops.attention.flash:FLASH3",
    "flash2": "torch_backend.ops.attention.flash:FLASH2",
    "triton": "torch_backend.ops.attention.triton:TRITON",
    "varlen": "torch_backend.ops.attention.varlen:VARLEN",
    "flex": "torch_backend.ops.attention.flex:FLEX",
    "xformers": "torch_backend.ops.attention.xformers:XFORMERS",
    "sdpa": "torch_backend.ops.attention.sdpa:SDPA",
    "reference": "torch_backend.ops.attention.reference:REFERENCE",
}


def choose(
    request: AttentionRequest, packed: PackedMetadata, implementation: str | Sequence[str] = "auto"
) -> tuple[str, AttentionRequest]:
    """Selects an implementation for a request, and returns both as they will run.

    Where no implementation works without the segments' lengths on the host, they are read from the device, once per
    batch, and the request says so.

    Raises:
        UnsupportedError: none of the wanted implementations supports the request; the message has the reason of each.
    """
    try:
        return select(request, implementation), request
    except UnsupportedError:
        if packed.lengths is not None or not packed.readable:
            raise
        host_lengths(packed)
    request = replace(request, host_lengths=True)
    return select(request, implementation), request


def run(
    name: str,
    request: AttentionRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedMetadata,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Run what :func:`choose` returned on the tensors that the request was made from."""
    return load(name)(AttentionInputs(q, k, v, packed, sinks, alibi_slopes), request)


def select(request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> str:
    """Returns the name of the first implementation that supports ``request``; a named one has no substitute."""
    reasons: dict[str, str] = {}
    for name in _names(request, implementation):
        reason = refusal(load(name), request)
        if reason is None:
            if implementation == "auto" and not request.compiling:
                _log_choice(request.device.type, name, tuple(reasons.items()))
            return name
        reasons[name] = reason
    refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(
        f"no packed attention for {describe(request)}: {refused}. "
        f'Pass implementation="auto" or another of {", ".join(IMPLEMENTATIONS)}',
        option="implementation",
    )


def refusal(implementation: Implementation, request: AttentionRequest) -> str | None:
    """Explains why an implementation cannot serve a request, None if it can."""
    if request.parents:
        if not getattr(implementation, "parents", False):
            return "no segments that continue others (shared prefixes)"
        if request.dropout:
            return "no dropout in shared prefixes, whose documents would share one mask"
    if request.both_ways and not getattr(implementation, "both_ways", False):
        return "no spans that see both ways (images, prefixes)"
    if request.both_ways and request.key_tokens is not None:
        return "no spans that see both ways at the end of longer key segments"
    if request.key_tokens is not None and not getattr(implementation, "more_keys", False):
        return "takes as many keys as queries"
    return implementation.supports(request)


def prepare(packed: PackedMetadata, request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> None:
    """Derive from the segments what layers that ask like ``request`` share, before they run.

    A compiled layer that found nothing derived would have a graph of its own in which it is. The request may be one
    of an earlier batch.
    """
    segments = packed.cu_seqlens.shape[0] - 1
    if not request.both_ways:
        packed = packed.without_spans
    request = replace(
        request,
        tokens=packed.tokens,
        segments=segments,
        max_seqlen=packed.max_seqlen,
        host_lengths=packed.lengths is not None,
        compiling=True,
        parents=packed.parents is not None,
        both_ways=packed.spans is not None,
    )
    make = getattr(load(select(request, implementation)), "prepare", None)
    if make is not None:
        make(packed, request)


def runs_parents(device: torch.device, implementation: str | Sequence[str] = "auto") -> bool:
    """Returns whether one of the wanted implementations runs segments that continue others."""
    return any(getattr(load(name), "parents", False) for name in candidates(device, implementation))


def compiles_parents(request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> bool:
    """Returns whether compiled layers that ask like ``request`` could run segments that continue others."""
    try:
        name = select(replace(request, parents=True, compiling=True), implementation)
    except UnsupportedError:
        return False
    return getattr(load(name), "compiled_parents", False)


def rejections(request: AttentionRequest, implementation: str | Sequence[str] = "auto") -> dict[str, str | None]:
    """Every candidate in the order it is tried, with the reason it is not chosen, or None where it can be.

    The reason is why it cannot serve ``request`` or, where "auto" has found another that serves, why it is tried last.
    """
    reasons: dict[str, str | None] = {}
    for name in _names(request, implementation):
        reason = refusal(load(name), request)
        if reason is None and implementation == "auto" and None in reasons.values():
            why = last_resort(load(name), request)
            reason = None if why is None else f"{TRIED_LAST}, because {why}"
        reasons[name] = reason
    return reasons


def needs_host_lengths(implementation: str) -> bool:
    """Returns whether the implementation of that name reads ``packed.lengths``."""
    return load(implementation).host_lengths


def candidates(device: torch.device, implementation: str | Sequence[str]) -> tuple[str, ...]:
    """The implementations to try; the order of "auto" also depends on the request (:mod:`.order`)."""
    if implementation == "auto":
        return CUDA if device.type == "cuda" else CPU
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise UnsupportedError(f"no attention implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    return names


def _names(request: AttentionRequest, implementation: str | Sequence[str]) -> tuple[str, ...]:
    return order(request, load) if implementation == "auto" else candidates(request.device, implementation)


def load(name: str) -> Implementation:
    """Returns the implementation of that name; its module is imported on first use."""
    found: Implementation = tables.load(IMPLEMENTATIONS, name)
    return found


@cache
def _log_choice(device: str, name: str, reasons: tuple[tuple[str, str], ...]) -> None:
    passed = "".join(f"; not {other}: {reason}" for other, reason in reasons)
    logger.info("packed attention on %s runs on %s%s", device, name, passed)
