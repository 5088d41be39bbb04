"""Computes two things of patches otherwise in packed calls: their embedding as a product, their rotation by Triton.

Towers embed patches by a convolution whose kernel is as large as its input. That is a matrix product, and libraries run
a convolution in three dimensions many times slower. The function that rotates patches has the form of
``apply_rotary_pos_emb``, with one axis of tokens; it is found, by calling it, as :mod:`.rotary` finds that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_backend.hf.entry import current_forward
from torch_backend.hf.override import LayerOverride
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.rope import apply_rope
from torch_backend.ops.rope.reference import rotate

_ROTATION = "apply_rotary_pos_emb_vision"


# -- the embedding ---------------------------------------------------------------------------------------------------


def product_edits(tower: nn.Module) -> Iterator[LayerOverride]:
    """The edits of a tower's convolutions over whole patches."""
    for module in tower.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and _covers_its_kernel(module):
            yield LayerOverride(module, _as_product)


def _covers_its_kernel(conv: Any) -> bool:
    """Returns whether a convolution is a product where its input is as large as its kernel."""
    plain = set(conv.padding) == {0} and set(conv.dilation) == {1} and conv.groups == 1
    return plain and not conv.transposed


def _as_product(conv: Any, call: Callable[..., Any], x: Tensor) -> Any:
    """[N, C, *kernel] -> [N, E, 1, ...]; nothing hands the convolution the packed call, so it has to ask."""
    if tuple(x.shape[2:]) != tuple(conv.kernel_size) or not pays_off(x) or current_forward() is None:
        return call(x)
    out = F.linear(x.flatten(1), conv.weight.flatten(1), conv.bias)
    return out.view(*out.shape, *[1] * (x.ndim - 2))


def pays_off(x: Tensor) -> bool:
    """Returns whether a product is faster; on the CPU it only rounds differently."""
    return x.device.type != "cpu"


# -- the rotation ----------------------------------------------------------------------------------------------------


def override_rotation_of_patches(known: Mapping[str, Any]) -> dict[str, Any]:
    """The name of the rotation among the functions that a layer calls, and ours in its place; empty without one."""
    original = known.get(_ROTATION)
    if original is None or not _pairs_halves(original):
        return {}
    return {_ROTATION: partial(_rotate, original)}


def _rotate(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for ``apply_rotary_pos_emb_vision``: q, k [T, H, D] and full-width angles [T, D]."""
    if not runs_triton(q) or not (q.ndim == k.ndim == 3 and cos.ndim == 2):
        found: tuple[Tensor, Tensor] = original(q, k, cos, sin)
        return found
    half = cos.shape[-1] // 2
    return apply_rope(q, k, cos[:, :half], sin[:, :half])


@cache
def _pairs_halves(original: Callable[..., Any]) -> bool:
    """Returns whether a modeling file's rotation of patches pairs the halves of a head."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, 8, generator=generator) for heads in (2, 1))
    angle = torch.randn(5, 4, generator=generator)
    cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
    try:
        found = original(q, k, cos, sin)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    right = [rotate(x, angle.cos(), angle.sin(), interleaved=False) for x in (q, k)]
    return all(x.shape == y.shape and torch.allclose(x, y, atol=1e-6) for x, y in zip(found, right, strict=True))
