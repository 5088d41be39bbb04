"""Routed experts of transformers models on our kernels: ``experts_implementation="crosspack"``.

A call of a module of experts, its tokens and its router's choices -> :func:`run_experts` -> ``ops.experts``. In a
packed forward, padding routes to no expert. Which tokens are padding is known to the packed forward, and experts
receive hidden states alone, so the decoder layer around them says it for the time of its call (``THREAD.layer`` of
:mod:`.entry`). It does so on whatever thread the layer runs, also where gradient checkpointing runs it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.expert_layouts import (
    ExpertsLayout,
    is_spread,
    layout_of,
    makes_weights,
    weights_of,
)
from torch_backend.hf.entry import THREAD
from torch_backend.ops.experts import Adapter, ExpertsRequest, experts, request_of, select
from torch_backend.ops.mxfp4 import Mxfp4Weight

NAME = "crosspack"
LAYOUT = "_crosspack_experts"
TILE_OF_EXPERTS = "_crosspack_tile"  # of a module in a step on a long row: tokens that are computed at a time


@dataclass(frozen=True)
class ExpertsChoice:
    """A module of experts: the implementation that ran, and its request."""

    implementation: str
    request: ExpertsRequest


def experts_forward(module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The forward of a module of experts that names ``experts_implementation="crosspack"``."""
    layout = module.__dict__.get(LAYOUT)
    if layout is None or not layout.is_current(module):
        layout = layout_of(module)
        if isinstance(layout, str):
            raise UnsupportedModelError(
                f'experts_implementation="{NAME}" does not run {type(module).__name__}, because {layout}: '
                'set it to "grouped_mm"'
            )
        module.__dict__[LAYOUT] = layout
    return run_experts(module, layout, hidden, indices, weights, {})


def run_experts(
    module: Any,
    layout: ExpertsLayout,
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    adapters: Mapping[str, Adapter],
) -> Tensor:
    """A module of experts on our kernels.

    Args:
        hidden: [T, D]. indices, weights: [T, K], the router's.
        adapters: by the name of the parameter that they add to.

    Returns:
        [T, D], dtype of ``hidden``.
    """
    forward = THREAD.layer
    biases = (getattr(module, f"{layout.up}_bias"), module.down_proj_bias) if layout.biased else (None, None)
    dtype = None
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    scales: dict[str, Tensor] = {}
    if isinstance(stored := module._parameters.get(layout.up), Mxfp4Weight):
        dtype, up, down = dtype or stored.dtype, stored.blocks, module.down_proj.blocks
        scales = {"up_scales": stored.scales, "down_scales": module.down_proj.scales}
    else:
        up, down = weights_of(module, layout, dtype)
        dtype = up.dtype
    # where ranks exchange tokens, those that arrive are not those of the row, even if they are as many
    real = None if forward is None or is_spread(module) else forward.real
    if real is not None and real.shape[0] == indices.shape[0]:
        indices = torch.where(real[:, None], indices, up.shape[0])
    tensors = hidden.to(dtype), indices, weights, up, down
    options: dict[str, Any] = {
        "up_bias": None if biases[0] is None else biases[0].to(dtype),
        "down_bias": None if biases[1] is None else biases[1].to(dtype),
        "activation": layout.activation,
        "interleaved": layout.interleaved,
        "up_adapter": _in_dtype(adapters.get(layout.up), dtype),
        "down_adapter": _in_dtype(adapters.get("down_proj"), dtype),
        **scales,
    }
    if forward is not None and not torch.compiler.is_compiling():
        request = request_of(*tensors, **options)
        forward.experts[id(module)] = ExpertsChoice(select(request), request)
    if makes_weights(module, layout) and not (up.requires_grad or down.requires_grad):
        options["again"] = partial(weights_of, module, layout, dtype)
    tile = getattr(module, TILE_OF_EXPERTS, None)
    return experts(*tensors, **options, tile=tile).to(hidden.dtype)


def _in_dtype(adapter: Adapter | None, dtype: torch.dtype) -> Adapter | None:
    return None if adapter is None else Adapter(adapter.a.to(dtype), adapter.b.to(dtype), adapter.scale)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
