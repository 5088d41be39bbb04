"""The table of implementations of experts, their order, and the loop that selects among them."""

from __future__ import annotations

from collections.abc import Sequence

from packing_core.errors import UnsupportedError
from torch_backend.ops import tables
from torch_backend.ops.experts.products import Products
from torch_backend.ops.experts.request import ExpertsRequest

# name -> where its object lives; imported on first use
IMPLEMENTATIONS = {
    "triton": "torch_backend.ops.experts.triton:TRITON_EXPERTS",
    "grouped_mm": "torch_backend.ops.experts.grouped_mm:GROUPED_MM",
    "plain": "torch_backend.ops.experts.plain:PLAIN",
}
# From this mean number of tokens per expert on, the library's product gains more than the gathers before it cost: on an
# H100 1.74 ms against 1.90 at 64 tokens (benchmarks/RESULTS.md). Below it nothing was measured.
MANY_TOKENS = 64


def order(request: ExpertsRequest) -> tuple[str, ...]:
    """The names in the order in which "auto" tries them."""
    if request.device.type != "cuda":
        return ("plain",)
    fast = ("grouped_mm", "triton") if request.mean >= MANY_TOKENS else ("triton", "grouped_mm")
    return (*fast, "plain")


def select(request: ExpertsRequest, implementation: str | Sequence[str] = "auto") -> str:
    """Returns the name of the first implementation that supports ``request``; a named one has no substitute.

    Raises:
        UnsupportedError: none does; the message has the reason of each.
    """
    reasons = rejections(request, implementation)
    for name, reason in reasons.items():
        if reason is None:
            return name
    refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(
        f"no experts for {describe(request)}: {refused}. "
        f'Pass implementation="auto" or another of {", ".join(IMPLEMENTATIONS)}'
    )


def rejections(request: ExpertsRequest, implementation: str | Sequence[str] = "auto") -> dict[str, str | None]:
    """Every candidate up to the first that supports ``request``, with the reason against it; None at the last."""
    if implementation == "auto":
        names = order(request)
    else:
        names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    reasons: dict[str, str | None] = {}
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise UnsupportedError(f"no experts implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
        reasons[name] = load(name).supports(request)
        if reasons[name] is None:
            break
    return reasons


def load(name: str) -> Products:
    """Returns the implementation of that name; its module is imported on first use."""
    found: Products = tables.load(IMPLEMENTATIONS, name)
    return found


def describe(request: ExpertsRequest) -> str:
    """The request in a few words, for error messages and ``explain``."""
    adapters = [str(rank) for rank in request.ranks if rank]
    options = [
        f"{request.activation.name}{' with gates' if request.activation.gated else ''}",
        "biases" if request.biases else "",
        request.stored and f"weights in {request.stored}",
        f"adapters of rank {' and '.join(dict.fromkeys(adapters))}" if adapters else "",
    ]
    return (
        f"{request.top_k} of {request.experts} experts of {request.width} x {request.inner}, "
        f"{str(request.dtype).removeprefix('torch.')} on {request.device.type}, {', '.join(o for o in options if o)}"
    )
