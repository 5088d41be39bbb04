"""Liger's and Unsloth's kernels in a model, and the plain operations that run in their place in compiled layers.

These libraries replace the forward of modules, classes of modeling files and functions in them. torch.compile runs
their Triton kernels wrongly, because these change their inputs in place (torch 2.11, liger-kernel 0.8.5: a loss of 4.92
in place of 4.76), and it fuses the plain operations as well. So compiled layers run the forward of the class that was
replaced. Where only the library's class is left, its operations are written out here. Everything outside of compiled
layers keeps the library's kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec, module_from_spec
from inspect import isclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_backend.hf.anatomy.families import ROTATION
from torch_backend.hf.anatomy.structure import library_of
from torch_backend.hf.override import OUTER, called, original_class

_OF_LIGER = ("skip_logits", "return_token_accuracy")  # arguments that only its forwards of models take


# -- modules ---------------------------------------------------------------------------------------------------------


def replaced_modules(layers: Iterable[nn.Module]) -> dict[nn.Module, type[nn.Module] | None]:
    """Finds the modules in some layers whose forward is a library's.

    Returns:
        For each, the class whose forward computes the same by plain operations; None if there is none.
    """
    found: dict[nn.Module, type[nn.Module] | None] = {}
    for module in (m for layer in layers for m in layer.modules()):
        if library_in(module):
            found[module] = _plain_class(type(module))  # type: ignore[arg-type] # a class is hashable
    return found


def library_in(module: nn.Module) -> str | None:
    """Names the library whose forward a module runs, None if it runs its own."""
    own = [library_of(module.__dict__[name]) for name in _own_names(module)]
    return library_of(type(module)) or next(iter(own), None)


def unknown_part(layers: Iterable[nn.Module]) -> str | None:
    """Describes a module or a function in some layers that plain operations cannot replace; None if there is none."""
    layers = list(layers)
    replaced = replaced_modules(layers)
    for module, plain in replaced.items():
        if plain is None:
            return f"{library_of(type(module))}'s {type(module).__name__}"
    for module in (m for layer in layers for m in layer.modules()):
        kind = replaced.get(module) or original_class(module)
        functions = {n: f for n, f in called(kind.forward).items() if not isclass(f)}
        name = next((n for n, f in functions.items() if library_of(f) and not _is_plain_here(module, n, f)), None)
        if name is not None:
            return f"{library_of(functions[name])}'s {name}"
    return None


def _is_plain_here(module: nn.Module, name: str, function: Any) -> bool:
    """Returns whether packed calls of a patched layer run another function under this name."""
    return name == ROTATION and plain_rotation(function) is not None and type(module) is not original_class(module)


@contextmanager
def without_kernels(modules: Mapping[nn.Module, type[nn.Module] | None]) -> Iterator[None]:
    """Inside, modules found by :func:`replaced_modules` run plain operations."""
    before = [(m, type(m), {name: m.__dict__.pop(name) for name in _own_names(m)}) for m in modules]
    for module, plain in modules.items():
        if plain is not None and plain is not type(module):
            module.__class__ = plain
    try:
        yield
    finally:
        for module, kind, own in before:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.update(own)


def _own_names(module: nn.Module) -> list[str]:
    """Attributes of an instance that hold a library's forward; one that a patch found is behind its override."""
    return [name for name in ("forward", OUTER) if library_of(module.__dict__.get(name))]


@cache
def _plain_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """One class for all modules of a kind, so that equal layers share their compiled graphs."""
    if library_of(kind) is None:
        return kind
    for base in kind.__mro__:
        if library_of(base) is None and issubclass(base, nn.Module) and base is not nn.Module:
            return base
    written = next(c for c in kind.__mro__ if "forward" in vars(c))
    forward = _PLAIN.get(written.__name__)
    return None if forward is None else type(kind.__name__, (kind,), {"forward": forward})


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Computes an RMS norm; the casting mode says what is rounded to the dtype of the input before the weight."""
    x = hidden_states if self.casting_mode == "none" else hidden_states.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    if self.weight is None:
        return x.to(hidden_states.dtype)
    if self.casting_mode == "gemma":
        return ((self.offset + self.weight.float()) * x).to(hidden_states.dtype)
    weight = self.offset + self.weight if self.offset else self.weight
    return weight * x.to(hidden_states.dtype)


def _swiglu(self: Any, x: Tensor) -> Tensor:
    product: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    return product


def _geglu(self: Any, x: Tensor) -> Tensor:
    product: Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
    return product


def _joined_swiglu(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    product: Tensor = self.down_proj(F.silu(gate) * up)
    return product


def _scaled_swiglu(self: Any, x: Tensor) -> Tensor:
    inner = F.silu(self.gate_proj(x) * self.gate_multiplier) * self.up_proj(x)
    product: Tensor = self.down_proj(inner) * self.down_multiplier
    return product


def _relu_squared(self: Any, x: Tensor) -> Tensor:
    return F.relu(x).square()


def _layer_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.variance_epsilon)


# By the class in which Liger writes the forward.
_PLAIN: dict[str, Callable[..., Tensor]] = {
    "LigerRMSNorm": _rms_norm,
    "LigerRMSNormForGemma4": _rms_norm,
    "LigerLayerNorm": _layer_norm,
    "LigerSwiGLUMLP": _swiglu,
    "LigerQwen3MoeSwiGLUMLP": _swiglu,
    "LigerHunyuanV1SwiGLUMLP": _swiglu,
    "LigerFalconH1SwiGLUMLP": _scaled_swiglu,
    "LigerReLUSquared": _relu_squared,
    "LigerGEGLUMLP": _geglu,
    "LigerPhi3SwiGLUMLP": _joined_swiglu,
}


# -- the rotation ----------------------------------------------------------------------------------------------------


def plain_rotation(function: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns what a rotation of Liger's computes, by plain operations, None for another function."""
    return _ROTATIONS.get(getattr(function, "__name__", "")) if library_of(function) == "Liger" else None


def half_rotation(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates q and k [B, H, S, D] by angles [B, S, R], the R/2 angles of a token twice in a row; R <= D."""
    cos, sin, width = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        turning, rest = x[..., :width], x[..., width:]
        first, second = turning.chunk(2, dim=-1)
        found = turning * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found

    return turned(q), turned(k)


def half_rotation_by_each_angle(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """As :func:`half_rotation`, by angles [B, S, R/2], as gpt_oss has them."""
    cos, sin = (torch.cat((x, x), dim=-1) for x in (cos, sin))
    return half_rotation(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


_ROTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "liger_rotary_pos_emb": half_rotation,
    "liger_rotary_pos_emb_gpt_oss": half_rotation_by_each_angle,
}


# -- the model's forward ---------------------------------------------------------------------------------------------


def has_ligers_forward(root: nn.Module) -> bool:
    """Returns whether a model runs Liger's forward of its family, and nothing was wrapped around that since."""
    return bool(_ligers_names(root)) or library_of(original_class(root).forward) == "Liger"


@contextmanager
def own_forward(root: nn.Module) -> Iterator[None]:
    """Inside, a model whose forward is Liger's runs the one of its modeling file."""
    before = {name: root.__dict__.pop(name) for name in _ligers_names(root)}
    written, added = original_class(root), None
    if library_of(written.forward) == "Liger":  # the class itself was changed
        added = "forward" if type(root) is written else OUTER
        root.__dict__[added] = MethodType(_in_file(written).forward, root)  # type: ignore[arg-type] # a class is hashable
    try:
        yield
    finally:
        if added is not None:
            del root.__dict__[added]
        root.__dict__.update(before)


def _ligers_names(root: nn.Module) -> list[str]:
    """Attributes of the instance that hold Liger's forward; accelerate's wrapper keeps one in ``_original_forward``."""
    names = (OUTER,) if "_original_forward" in root.__dict__ else (OUTER, "forward")
    return [name for name in names if library_of(root.__dict__.get(name)) == "Liger"]


def without_library_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch without the arguments that only Liger's forward of a model takes."""
    return {name: x for name, x in batch.items() if name not in _OF_LIGER}


@cache
def _in_file(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a class as its file defines it, from a copy of the module that is not registered."""
    spec = find_spec(kind.__module__)
    assert spec is not None and spec.loader is not None and kind.__module__ in sys.modules
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    found: type[nn.Module] = getattr(copy, kind.__name__)
    return found
