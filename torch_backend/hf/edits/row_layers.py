"""Forwards of recurrent layers on whole rows, in place of their own.

First, layers that run there by our Triton scans alone, and on batches of documents without them. Their modeling files
have no function that could mean another one: Mamba's passes its scan no segments, RG-LRU and lightning attention walk
over tokens or blocks in their forward. For each class: what its scan needs, and its forward on a row where its own is
of no use. Then, the gated norms of any layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.anatomy.additions import has_hooks
from torch_backend.hf.anatomy.families import GATED_NORMS
from torch_backend.hf.edits.stand_ins import LayerSegments, convolve_by_triton, decayed_scan, diagonal_scan
from torch_backend.hf.override import has_own_forward, original_class
from torch_backend.ops.norm import WIDEST, gated_rms_norm
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.scan import modeling_calls as scans


class _Instead:
    """A module some of whose attributes are others; what a forward sets on it stays here."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def recurrent_gemma(layer: Any, segments: LayerSegments, input_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """The recurrent block of Griffin (De et al. 2024, https://arxiv.org/abs/2402.19427, section 2.3) on a row."""
    shape = input_states.shape

    def convolution(x: Tensor) -> Tensor:
        return convolve_by_triton(segments, x, layer.conv_1d.weight, layer.conv_1d.bias)

    def walk(hidden_states: Tensor, recurrent_gate: Tensor, **others: Any) -> tuple[Tensor, None]:
        """``h_t = a_t h_{t-1} + x_t``; in the log of the gate, whose lowest normal number stands for 0."""
        u, gate = (y.flatten(0, 1).float() for y in (hidden_states, recurrent_gate))
        one = u.new_ones(len(u), 1)
        log = gate.clamp(min=torch.finfo(torch.float32).tiny).log()
        h = diagonal_scan(segments, u, log, u.new_ones(u.shape[1], 1), one, one)
        return h.view(hidden_states.shape).to(hidden_states.dtype), None

    unit = layer.rg_lru
    cut = segments.context is not None  # then a piece that continues a document does not begin at position 0
    positions = kwargs["position_ids"] if cut else segments.packed.position_ids.view(shape[:2])

    def gated(x: Tensor, _: Tensor) -> Tensor:
        found: Tensor = type(unit).forward(_Instead(unit, _rnn_scan=walk, recurrent_states=None), x, positions)
        return found

    block: Any = _Instead(layer, conv_1d=convolution, rg_lru=gated)
    out, _ = original_class(layer).forward(block, input_states, positions, None, use_cache=False)
    return out, None


def minimax(layer: Any, segments: LayerSegments, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """Lightning attention (MiniMax 2025, https://arxiv.org/abs/2501.08313, section 2.2): a scan of constant decays."""
    tokens = hidden_states.flatten(0, 1)
    heads, width = layer.num_attention_heads, layer.head_dim
    q, k, v = layer.act_fn(layer.qkv_proj(tokens)).view(-1, heads, 3 * width).split(width, 2)
    g = -layer.slope_rate.view(1, heads).float().expand(len(tokens), heads)
    out = decayed_scan(segments, q, k, v, g).flatten(1)
    out = torch.sigmoid(layer.output_gate(tokens)) * layer.norm(out)
    return layer.out_proj(out).view(hidden_states.shape), None


def with_fast_norms(layer: nn.Module) -> Any:
    """A layer for one call of its forward, its gated norms in one pass each. A compiler makes that pass by itself."""
    if torch.compiler.is_compiling():
        return layer
    found = {name: partial(_gated_norm, child) for name, child in layer.named_children() if _is_fast(child)}
    return _Instead(layer, **found) if found else layer


def _is_fast(norm: nn.Module) -> bool:
    """Returns whether a module is a gated norm that the kernel supports, without hooks or a replaced forward."""
    if original_class(norm).__name__ not in GATED_NORMS or has_own_forward(norm):
        return False
    weight: Any = norm.weight
    known = norm.activation in ("silu", "sigmoid") and len(weight) <= WIDEST
    return known and not has_hooks(norm) and runs_triton(weight)


def _gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    return gated_rms_norm(x, norm.weight, gate, eps=norm.variance_epsilon, silu=norm.activation == "silu")


# Class -> the kind of its scan, and of a layer the widths of k (or the numbers of a state) and of v.
_SCANS: dict[str, tuple[str, Callable[[Any], tuple[int, int]]]] = {
    **dict.fromkeys(
        ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"),
        (scans.SELECTIVE, lambda layer: (layer.A_log.shape[-1], 1)),
    ),
    "RecurrentGemmaRecurrentBlock": (scans.SELECTIVE, lambda layer: (1, 1)),
    "MiniMaxLightningAttention": (scans.LINEAR, lambda layer: (layer.head_dim, layer.head_dim)),
}
# Class -> its forward on a row; takes the layer, its segments and the arguments of a call.
FORWARDS: dict[str, Callable[..., Any]] = {
    "RecurrentGemmaRecurrentBlock": recurrent_gemma,
    "MiniMaxLightningAttention": minimax,
}


def without_triton(layer: nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """Explains why our kernels do not run the scan of a layer, None if they do or the layer needs none.

    Args:
        layer: of any class.
        dtype: of its activations; by default that of its weights.
    """
    known = _SCANS.get(original_class(layer).__name__)
    if known is None:
        return None
    kind, widths = known
    weight = next(layer.parameters())
    return scans.refused_kind(kind, weight.new_empty(0, dtype=dtype), *widths(layer))
