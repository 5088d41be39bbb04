"""Registers the project's kernels as operators that ``torch.compile`` calls and does not look into.

A launcher (plain Python that allocates its outputs and starts a kernel) -> :func:`operator` -> an entry of
``torch.ops.crosspack``. Autograd stays outside: each public function is a ``torch.autograd.Function`` over two such
operators, as :func:`differentiable` makes it. Registering with the dispatcher directly costs 3 microseconds a call
where ``torch.library.custom_op`` costs 13, which counts beside a kernel of ten. A function of any number of arguments
declares ``(ctx, *arguments)`` alone: without gradients, Dynamo leaves the context out where a call has as many
arguments as the forward has parameters, which ``(ctx, x, *others)`` has with two others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Both are settled for the process, as Triton settles them when kernels are defined.
TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NAMESPACE = "crosspack"  # a copy of these files for the Kernels Hub has one of its own
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


# The dispatcher's names of the types that launchers are annotated with.
_TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool", str: "str",
    list[Tensor]: "Tensor[]", Sequence[Tensor]: "Tensor[]", Sequence[Tensor | None]: "Tensor?[]", list[int]: "int[]",
    list[bool]: "bool[]", Sequence[bool]: "bool[]", Sequence[float]: "float[]",
}  # fmt: skip


def operator(schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``launch`` as an operator and return the callable operator.

    Args:
        schema: ``name(Tensor q, ...) -> Tensor``, in the dispatcher's notation; or the name alone of a launcher whose
            annotations say the rest.
        launch: what runs, on the CPU (kernels under ``TRITON_INTERPRET=1``) and on CUDA alike.
        fake: allocates outputs of the right shape, stride and dtype without running anything.
    """
    name, _, written = schema.partition("(")
    _LIBRARY.define(schema if written else f"{name}{_annotated(launch)}")
    _LIBRARY.impl(name, with_gapless_vectors(launch), "CPU")
    _LIBRARY.impl(name, on_its_device(with_gapless_vectors(launch)), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def with_gapless_vectors(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher that gets every vector, such as a bias, without gaps: kernels take no stride of one."""

    @wraps(launch)
    def launched(*arguments: Any) -> Any:
        return launch(*[x.contiguous() if isinstance(x, Tensor) and x.ndim == 1 else x for x in arguments])

    return launched


def differentiable(
    ahead: Callable[..., Any],
    behind: Callable[..., Any],
    *,
    tensors: int,
    outputs: int = 1,
    contiguous: bool = False,
    keeps_outputs: bool = False,
) -> Callable[..., Any]:
    """Joins two operators into a function with gradients.

    Args:
        ahead: from tensors (some None) and options to outputs, and then to what the backward keeps.
        behind: from the tensors, what was kept, the gradients of the outputs and the options to the gradients of the
            first tensors.
        tensors, outputs: how many there are.
        contiguous: both get tensors without gaps.
        keeps_outputs: the backward reads the outputs too, in front of what else is kept.
    """
    first_kept = 0 if keeps_outputs else outputs

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            operands, ctx.options = arguments[:tensors], arguments[tensors:]
            if contiguous:
                operands = tuple([None if x is None else x.contiguous() for x in operands])
            results = ahead(*operands, *ctx.options)
            if isinstance(results, Tensor):
                results = (results,)
            ctx.save_for_backward(*operands, *results[first_kept:])
            return results[0] if outputs == 1 else tuple(results[:outputs])

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            douts = tuple([x.contiguous() for x in douts]) if contiguous else douts
            results = behind(*saved, *douts, *ctx.options)
            gradients = [None if x is None else gradient for x, gradient in zip(saved, results, strict=False)]
            return *gradients, *[None] * (tensors - len(results) + len(ctx.options))

    return Differentiable.apply


def arguments_of(annotated: Any) -> str:
    """The arguments of an operator that are annotated, on a launcher or a named tuple."""
    hints = get_type_hints(annotated)
    return ", ".join(f"{_TYPES[kind]} {name}" for name, kind in hints.items() if name != "return")


def _annotated(launch: Callable[..., Any]) -> str:
    returned = get_type_hints(launch)["return"]
    several = ", ".join(_TYPES[kind] for kind in get_args(returned))
    return f"({arguments_of(launch)}) -> {_TYPES.get(returned, f'({several})')}"


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch`` with its first argument's device as the current one: Triton starts kernels on the current device.

    Started on another, a kernel would run beside what makes its inputs and not after it.
    """

    @wraps(launch)
    def run(first: Tensor, *others: Any) -> Any:
        if first.device.index == torch.cuda.current_device():
            return launch(first, *others)
        with torch.cuda.device(first.device):
            return launch(first, *others)

    return run


def runs_triton(x: Tensor) -> bool:
    """Returns whether Triton kernels support this tensor: it is on a GPU, or the kernels are interpreted on the CPU.

    Bfloat16 needs a GPU that computes in it; plain torch, which emulates it, runs on others (a T4).
    """
    served = x.dtype in (torch.float16, torch.float32) or (x.dtype == torch.bfloat16 and has_bfloat16(x.device))
    return TRITON and served and (x.is_cuda or INTERPRETED)


@torch.compiler.assume_constant_result  # as shared_memory
def has_bfloat16(device: torch.device) -> bool:
    """Returns whether a device computes in bfloat16: GPUs from compute capability 8.0, and CPUs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result  # a trace reads a cached function anew, and warns the user of it
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on a device; 0 where kernels are interpreted."""
    return _shared_memory(device)


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own stubs lack the attribute
    return int(properties.shared_memory_per_block_optin)
