"""The Triton rotary embedding inside patched attention layers, in packed forwards alone.

Most modeling files of transformers rotate through one function, ``apply_rotary_pos_emb(q, k, cos, sin)``. In a layer's
packed forward that name means :func:`_turned` (:mod:`.rebinding`): it runs where a CarriedMask comes in,
and every other call takes the forward that was there before. Which rotation a modeling file means is found by calling
its function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf.carry import CarriedMask
from torch_backend.hf.rebinding import called, rebound
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.rope import apply_rope
from torch_backend.ops.rope.reference import rotate

NAME = "apply_rotary_pos_emb"
_BEFORE, _PACKED = "_crosspack_rotary_before", "_crosspack_rotary_packed"
Rotation = Callable[..., tuple[Tensor, Tensor]]


def wrap(layer: nn.Module) -> bool:
    """Give an attention layer a packed forward with the Triton rotation; False if its rotation has another form."""
    packed_forward = _packed_forward(type(layer).forward)
    if packed_forward is None:
        return False
    layer.__dict__[_BEFORE] = layer.__dict__.get("forward")
    layer.__dict__[_PACKED] = packed_forward
    # a method and no partial: torch.compile guards a method by its function, so equal layers share one graph
    layer.forward = MethodType(_forward, layer)
    return True


def unwrap(layer: nn.Module) -> None:
    """Take back what :func:`wrap` did; without effect on a layer that it left alone."""
    if _BEFORE not in layer.__dict__:
        return
    before = layer.__dict__.pop(_BEFORE)
    del layer.__dict__[_PACKED]
    if before is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = before


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    before = layer.__dict__[_BEFORE]
    packed = any(isinstance(value, CarriedMask) for value in (*args, *kwargs.values()))
    if packed and before is None:
        return layer.__dict__[_PACKED](layer, *args, **kwargs)
    return (before or partial(type(layer).forward, layer))(*args, **kwargs)


@cache
def _packed_forward(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """``forward`` with the Triton rotation, or None if it does not rotate as :func:`apply_rope` can."""
    original: Rotation | None = called(forward).get(NAME)
    if original is None or (interleaved := interleaving(original)) is None:
        return None
    return rebound(forward, {NAME: partial(_turned, original, interleaved)})


def _turned(
    original: Rotation, interleaved: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """What stands for ``apply_rotary_pos_emb``: q, k [B, H, S, D] and full-width angles [B, S, R]."""
    if rest or named or not runs_triton(q) or not (q.ndim == k.ndim == 4 and cos.ndim == 3):
        return original(q, k, cos, sin, *rest, **named)
    half = cos.shape[-1] // 2
    return apply_rope(q, k, cos[..., :half], sin[..., :half], heads_first=True, interleaved=interleaved)


@cache
def interleaving(original: Rotation) -> bool | None:
    """Whether a modeling file's rotation pairs neighbouring channels (True) or halves (False); None: it does neither.

    It is called with angles as the standard rotary modules make them, the R/2 angles of a token twice in a row, and
    heads wider than R.
    """
    try:
        parameters = list(inspect.signature(original).parameters)
        if parameters[:4] != ["q", "k", "cos", "sin"] or not set(parameters[4:]) <= {"position_ids", "unsqueeze_dim"}:
            return None
        for partly in (True, False):
            generator = torch.Generator().manual_seed(0)
            q, k = (torch.randn(2, h, 5, 12 if partly else 8, dtype=torch.float64, generator=generator) for h in (2, 1))
            angle = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
            cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
            try:
                found = original(q, k, cos, sin)
            except RuntimeError:
                continue  # it cannot turn a part of a head; no such model has one
            for interleaved in (False, True):
                right = [
                    rotate(x.transpose(1, 2), angle.cos(), angle.sin(), interleaved=interleaved).transpose(1, 2)
                    for x in (q, k)
                ]
                if all(x.shape == y.shape and torch.allclose(x, y) for x, y in zip(found, right, strict=True)):
                    return interleaved
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return None
