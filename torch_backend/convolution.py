"""The Triton short convolution inside mixers, in packed forwards alone.

Modeling files of transformers convolve through one function, ``causal_conv1d_fn(x, weight, bias, activation)``: the
kernel of ``causal_conv1d`` where that library is installed, plain torch elsewhere. In a mixer's packed forward the name
means :func:`_convolve` (:mod:`torch_backend.rebinding`):

    x [n, C, L] of n documents --library, if it is installed and passes a trial--> [n, C, L]
                               --else, where Triton runs, torch_backend.conv--> [n, C, L]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.conv import reference, short_convolution
from torch_backend.metadata import PackedMetadata
from torch_backend.operators import runs_triton
from torch_backend.rebinding import called, rebound
from torch_backend.trial import apart, on

NAME = "causal_conv1d_fn"
LIBRARY = "causal_conv1d"
_TOLERANCE = 0.05  # a convolution that is wrong is so at order one; half-precision rounding at about one hundredth
# Arguments of the function that mean more than one document a row, or its end; the others are passed along unread.
_STATES = ("seq_idx", "initial_states", "return_final_states", "final_states_out")
Convolution = Callable[..., Tensor]


@cache
def packed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer class's ``forward`` with the convolution chosen here; as it is, if it convolves in another way."""
    original = called(forward, NAME)
    if original is None:
        return forward
    return rebound(forward, NAME, partial(_convolve, original)) or forward


def describe(layer: nn.Module) -> str:
    """What convolves in a packed forward of a mixer, and why the library does not; empty for other convolutions."""
    original = called(type(layer).forward, NAME)
    convolutions = [m for m in layer.children() if isinstance(m, nn.Conv1d)]
    if original is None or not convolutions:
        return ""
    weight = convolutions[0].weight
    refused = _library_fails(original, weight.device, weight.dtype)
    if refused is None:
        return f"convolution by {LIBRARY}"
    own = "crosspack's Triton kernel" if runs_triton(weight) else "plain torch"
    return f"convolution by {own} (not {LIBRARY}: {refused})"


def _convolve(
    original: Convolution,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """What stands for ``causal_conv1d_fn``: x [n, C, L], weight [C, W], bias [C] -> [n, C, L].

    Every row is one document that begins at its first token; what follows its end does not reach it.
    """
    fails = _library_fails(original, x.device, x.dtype)
    known = activation in (None, "silu", "swish") and not any(others.get(name) is not None for name in _STATES)
    if fails is None or not known or (not runs_triton(x) and find_spec(LIBRARY) is None):
        return original(x, weight, bias, activation=activation, **others)
    n, channels, length = x.shape
    rows = PackedMetadata(
        torch.arange(0, n * length + 1, length, dtype=torch.int32, device=x.device), length, n * length
    )
    rows.derived("position_ids", lambda _: torch.arange(length, device=x.device).repeat(n))
    flat = x.transpose(1, 2).reshape(n * length, channels)
    y = short_convolution(flat, weight, rows, bias=bias, silu=activation is not None)
    return y.view(n, length, channels).transpose(1, 2)


@torch.compiler.assume_constant_result
@cache
def _library_fails(original: Convolution, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``original`` is not the library's kernel, or cannot be used here: a tiny case, forward and backward."""
    if find_spec(LIBRARY) is None:
        return "it is not installed"
    try:
        error = _error(original, device, dtype)
    except Exception as failure:  # whatever it raises is the reason why it cannot be used here
        return (
            f"its trial run raised {type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"
        )
    return None if error <= _TOLERANCE else f"its trial run was wrong by {error:.2g} of the largest value"


@apart
def _error(convolution: Convolution, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 8, 16, generator=generator).to(device, dtype) for _ in range(2))
    weight = torch.randn(8, 4, generator=generator).to(device, dtype)

    def run(function: Convolution) -> list[Tensor]:
        inputs = [value.clone().requires_grad_() for value in (x, weight)]
        y = function(*inputs)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        positions = torch.arange(x.shape[2], device=device).repeat(x.shape[0])
        flat = x.transpose(1, 2).flatten(0, 1).float()
        y = reference.short_convolution(flat, weight.float(), None, positions, True)
        return y.view(x.shape[0], x.shape[2], -1).transpose(1, 2).to(dtype)

    with on(device):
        pairs = zip(run(lambda x, weight: convolution(x, weight, None, activation="silu")), run(plain), strict=True)
        return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)
