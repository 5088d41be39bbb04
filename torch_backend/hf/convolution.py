"""The short convolution inside a mixer that runs on the whole row: what stands for transformers' ``causal_conv1d_fn``.

Modeling files convolve x [B, C, S] through that one name: the kernel of ``causal_conv1d`` where it is installed, plain
torch elsewhere, and neither sees segments as transformers calls them. In a mixer's packed forward the name means
:func:`convolve` (:mod:`torch_backend.hf.rebinding`):

    x [B, C, S] and segments --where Triton runs, torch_backend.ops.conv--> [B, C, S]
                             --else, the function itself, on batches of documents of similar length--> [B, C, S]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.rebinding import segments
from torch_backend.ops.conv import short_convolution
from torch_backend.ops.documents import per_document
from torch_backend.ops.operators import runs_triton

NAME = "causal_conv1d_fn"
_STATES = ("initial_states", "return_final_states", "final_states_out")


def convolve(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """The causal convolution of each channel, restarted at every segment, and its activation.

    Args:
        function: what the modeling file calls by the name.
        x: [B, C, S], rows whose tokens the segments cover.
        weight: [C, W], bias: [C].
        activation: a name that transformers knows.
        others: the segments are one of them.

    Returns:
        [B, C, S], dtype of x.

    Raises:
        UnsupportedModelError: the layer has not handed on its segments, or convolves from or to a state.
    """
    packed = segments(others.values())
    if packed is None:
        raise UnsupportedModelError(f"a layer called {NAME} without its segments: its documents would see each other")
    if any(others.get(name) is not None and others[name] is not False for name in _STATES):
        raise UnsupportedModelError(f"a layer called {NAME} with a state, and packed documents start from none")
    tokens = x.transpose(1, 2)
    if runs_triton(x) and activation in (None, "silu", "swish"):
        y = short_convolution(tokens.flatten(0, 1), weight, packed, bias=bias, silu=activation is not None)
        return y.view(tokens.shape).transpose(1, 2)

    def alone(documents: Tensor) -> Tensor:
        return function(documents.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

    together: Tensor = per_document(packed, alone, (tokens,), {})
    return together.transpose(1, 2)
