"""Reads how the weights of routed experts are laid out and what stands between them.

A module that transformers' ``use_experts_implementation`` has made -> :func:`layout_of` -> an :class:`ExpertsLayout`,
or the reason why our kernels do not run it. Modeling files write their gates as code, so a gate is recognised by what
it computes: it must agree with one of the activations that the kernels know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.reference import ExpertActivation
from torch_backend.hf.anatomy.additions import has_hooks
from torch_backend.hf.anatomy.layers import MARKS_OF_EXPERTS
from torch_backend.hf.override import names, original_class
from torch_backend.ops.experts.plain import activated
from torch_backend.ops.experts.products import Between
from torch_backend.ops.mxfp4 import Mxfp4Weight

_SETTING = float | int | str | None | FunctionType | nn.Module
_ALPHAS, _LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ExpertsLayout:
    """The way in which a module of experts stores its weights.

    Attributes:
        activation: between the two products.
        up: the parameter of the first product, ``gate_up_proj`` or ``up_proj``.
        transposed: weights are [E, in, out]. interleaved: gates and values alternate. biased: both products have one.
        settings: what the module's code reads of it besides weights, by name.
    """

    activation: ExpertActivation
    up: str
    transposed: bool
    interleaved: bool
    biased: bool
    settings: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    def is_current(self, module: Any) -> bool:
        """Returns whether a module still has the settings with which it was read, and no hook on its activation."""
        act = module._modules.get("act_fn")
        return (act is None or not has_hooks(act)) and all(_setting(module, n) == value for n, value in self.settings)


def layout_of(module: Any) -> ExpertsLayout | str:
    """The layout of a module of experts, or a clause why our kernels do not run it."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    weights: list[Any] = [getattr(module, name, None) for name in (up, "down_proj")]
    if not all(isinstance(w, Tensor) and w.ndim == 3 for w in weights):
        kinds = ", ".join(f"{type(w).__name__} {list(w.shape) if isinstance(w, Tensor) else ''}" for w in weights)
        return f"its weights are not stacked: {kinds.strip()}"
    for w in weights:
        if w.dtype not in _FLOATING or hasattr(w, "quant_state"):
            return f"its weights are quantised ({type(w).__name__} of {str(w.dtype).removeprefix('torch.')})"
        if isinstance(w, Mxfp4Weight) and (w.requires_grad or not module.is_transposed):
            return "its weights are in MXFP4, which does not train: requires_grad_(False)"
    if weights[0].dtype != weights[1].dtype:
        return f"its weights are of two dtypes, {weights[0].dtype} and {weights[1].dtype}"
    if len({isinstance(w, Mxfp4Weight) for w in weights}) > 1:
        return "one of its weights is in MXFP4, and the other is not"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    interleaved = module.has_gate and not getattr(module, "is_concatenated", True)
    activation = _activation_of(module, interleaved)
    if activation is None:
        return "what stands between its products is no activation that the kernels know"
    gate = getattr(module, "_apply_gate", int)
    read = names(original_class(module).forward) | names(gate) | {*MARKS_OF_EXPERTS, "_apply_gate"}
    settings = tuple((n, x) for n in sorted(read - {"training"}) if isinstance(x := _setting(module, n), _SETTING))
    return ExpertsLayout(activation, up, bool(module.is_transposed), interleaved, bool(module.has_bias), settings)


def _setting(module: Any, name: str) -> Any:
    """An attribute or a part of an instance; of its class there is none."""
    return module.__dict__.get(name, module._modules.get(name))


def weights_of(module: Any, layout: ExpertsLayout, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The weights of both products as [E, out, in], in ``dtype`` if one is given."""
    up, down = getattr(module, layout.up), module.down_proj
    if isinstance(up, Mxfp4Weight):
        up, down = up.dequantize(dtype), down.dequantize(dtype)
    if layout.transposed:
        up, down = up.mT, down.mT
    return up.to(dtype or up.dtype), down.to(dtype or down.dtype)


def holds_4_bits(module: Any) -> bool:
    """Returns whether weights of a module are parameters in MXFP4."""
    return any(isinstance(x, Mxfp4Weight) for x in module._parameters.values())


def is_spread(module: nn.Module) -> bool:
    """Returns whether ranks hold different experts of a module (transformers' expert parallelism)."""
    return bool(getattr(module, "_is_expert_parallel", False))


def makes_weights(module: nn.Module, layout: ExpertsLayout | None = None) -> bool:
    """Returns whether a module computes a weight anew when it is asked for it, as that of 4 bits is (bitsandbytes)."""
    made = getattr(module, "parametrizations", {})
    names = ("gate_up_proj", "up_proj", "down_proj") if layout is None else (layout.up, "down_proj")
    return any(name in made for name in names)


def _activation_of(module: Any, interleaved: bool) -> ExpertActivation | None:
    """The activation that agrees with the module's own on numbers below, inside and above its limits."""
    alpha, limit = (next((float(v) for n in names if (v := getattr(module, n, None)) is not None), None)
                    for names in (_ALPHAS, _LIMITS))  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(64, 16, generator=generator, dtype=torch.float64) * 3
    z[:16] *= limit or 1.0
    try:
        with torch.no_grad():
            right = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    except Exception:  # it may call kernels of one device or dtype; whatever it raises, it is not recognised
        return None
    if not isinstance(right, Tensor) or right.dtype != z.dtype:
        return None
    for candidate in _candidates(bool(module.has_gate), alpha, limit):
        found = activated(z, Between(candidate, interleaved))
        if found.shape == right.shape and torch.allclose(found, right, rtol=1e-6, atol=1e-9):
            return candidate
    return None


def _candidates(gated: bool, alpha: float | None, limit: float | None) -> list[ExpertActivation]:
    names = ("silu", "gelu_tanh", "relu2")
    if not gated:
        return [ExpertActivation(name, gated=False) for name in names]
    options = product(names, dict.fromkeys((alpha or 1.0, 1.0)), dict.fromkeys((limit, None)), (0.0, 1.0))
    return [ExpertActivation(name, True, a, most or None, offset) for name, a, most, offset in options]
