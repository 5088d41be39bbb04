"""MLPs and experts of layers by tiles of tokens, in steps on long rows whose layers recompute them anyway.

A model, the level of its memory and the tokens of a row -> the MLPs of known form, which during the step run by
:func:`torch_backend.ops.tiled_mlp.tiled_mlp`, and the experts on our kernels, which take a tile at a time. Attention
and scans need no tiles: their kernels hold nothing that is larger than their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packing_core.training.memory_model import TILE, TILED_FROM
from torch_backend.hf.anatomy.experts import is_spread
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.edits.rebinding import names
from torch_backend.hf.experts import LAYOUT, TILE_OF_EXPERTS
from torch_backend.ops.tiled_mlp import Projection, tiled_mlp
from torch_backend.steps.memory import level_of

_PARTS = {"gate_proj", "up_proj", "down_proj"}
# classes of transformers' activations and of torch -> names in ops.tiled_mlp
_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}


def tiled_modules(model: nn.Module, tokens: int) -> list[nn.Module]:
    """Returns the MLPs and experts that a step on a row of ``tokens`` computes by tiles; none where the row is short.

    At ``"none"`` layers keep the inner columns of their MLPs, and there is nothing to save; experts keep their first
    product at ``"selective"`` too.
    """
    level = level_of(model)
    if tokens < TILED_FROM or level == "none":
        return []
    return [m for m in can_be_tiled(model) if level != "selective" or LAYOUT not in m.__dict__]


def can_be_tiled(model: nn.Module) -> list[nn.Module]:
    """Returns the MLPs and experts of a patched model that tiles can compute."""
    layers = [m for m in causal_lm(model).modules() if isinstance(m, DecoderLayer)]
    return [m for layer in layers for m in layer.modules() if why_not_tiled(m) is None]


def why_not_tiled(module: nn.Module) -> str | None:
    """Explains why a module is no MLP, and no experts, that tiles can compute, None if it is."""
    if LAYOUT in module.__dict__:
        return "ranks exchange its tokens" if is_spread(module) else None
    if not {name for name, _ in module.named_children()} >= _PARTS or "forward" in module.__dict__:
        return "it is no gated MLP"
    if names(type(module).forward) != {*_PARTS, "act_fn"}:
        return "it computes something else besides"
    if type(getattr(module, "act_fn", None)).__name__ not in _ACTIVATIONS:
        return "its activation has no gradient here"
    if any(_projection(getattr(module, name)) is None for name in _PARTS):
        return "its linear layers are not plain, nor plain with adapters"
    return None


@contextmanager
def tiled(modules: list[nn.Module]) -> Iterator[None]:
    """Inside, these MLPs and experts run by tiles."""
    experts = [module for module in modules if LAYOUT in module.__dict__]
    before = [(module, type(module)) for module in modules if LAYOUT not in module.__dict__]
    for module, kind in before:
        module.__class__ = _tiled_class(kind)  # type: ignore[arg-type] # a class is hashable
    for module in experts:
        module.__dict__[TILE_OF_EXPERTS] = TILE
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind
        for module in experts:
            del module.__dict__[TILE_OF_EXPERTS]


@cache
def _tiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """One class for all MLPs of a kind, so that equal layers share their compiled graphs."""
    return type(kind.__name__, (kind,), {"forward": _forward, "__module__": kind.__module__})


def _forward(self: Any, x: Tensor) -> Tensor:
    gate, up, down = (_projection(getattr(self, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    if gate is None or up is None or down is None or _dtype_of(x) != gate.weight.dtype:
        plain: Tensor = type(self).__mro__[1].forward(self, x)  # type: ignore[attr-defined]
        return plain
    return tiled_mlp(x, gate, up, down, activation=_ACTIVATIONS[type(self.act_fn).__name__], tile=TILE)


def _dtype_of(x: Tensor) -> torch.dtype | None:
    """The dtype in which a linear layer computes with ``x``; None if autocast would cast it."""
    kind = x.device.type
    return None if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype else x.dtype


def _projection(layer: Any) -> Projection | None:
    """A linear layer as tiles take it, None if it does something else."""
    if type(layer) is nn.Linear:
        return None if isinstance(layer.weight, DTensor) else Projection(layer.weight, layer.bias)
    base = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(layer, "lora_A") or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if layer.disable_adapters or layer.merged or name not in layer.lora_A or getattr(layer, "use_dora", {}).get(name):
        return None
    a, b = layer.lora_A[name], layer.lora_B[name]
    plain = type(a) is nn.Linear and type(b) is nn.Linear and a.bias is None and b.bias is None
    drops = not isinstance(layer.lora_dropout[name], nn.Identity)
    if not plain or drops or a.weight.dtype != base.weight.dtype or isinstance(base.weight, DTensor):
        return None
    return Projection(base.weight, base.bias, a.weight, b.weight, float(layer.scaling[name]))
