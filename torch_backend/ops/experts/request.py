"""The request of a call of ``experts``, by which implementations are chosen: checked once, here; holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from packing_core.errors import LayoutError
from packing_core.reference import ExpertActivation
from torch_backend.ops.mxfp4 import GROUP


class Adapter(NamedTuple):
    """A low-rank addition to the weights [E, N, K] of one product: ``scale * b @ a``.

    Attributes:
        a: [E, R, K], b: [E, N, R], any strides.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertsRequest:
    """Properties of a call that decide which implementations support it.

    Attributes:
        tokens, width, inner, experts, top_k: T, D, I, E, K.
        dtype, device: of x and of every weight.
        activation: between the two products.
        interleaved: whether gates and values alternate in the first product.
        biases: whether a product has one. ranks: of the adapters of both products, 0 for none.
        stored: "MXFP4" if the weights are, else "".
        aligned: whether every operand has rows of a multiple of 16 bytes, as matrix units of libraries want them.
    """

    tokens: int
    width: int
    inner: int
    experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    activation: ExpertActivation
    interleaved: bool
    biases: bool
    ranks: tuple[int, int]
    aligned: bool
    stored: str = ""

    @property
    def mean(self) -> float:
        """The mean number of tokens per expert."""
        return self.tokens * self.top_k / self.experts


_Operands = dict[str, tuple[Tensor | None, tuple[int, ...]]]  # each with the shape that it must have


def request_of(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ExpertActivation = ExpertActivation(),  # noqa: B008  frozen
    interleaved: bool = False,
    up_adapter: Adapter | None = None,
    down_adapter: Adapter | None = None,
    up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> ExpertsRequest:
    """The request that a call of ``experts`` with these arguments makes.

    Raises:
        LayoutError: shapes, dtypes or devices contradict each other, or an index on the CPU names no expert. Indices on
            another device are not read.
    """
    if x.ndim != 2 or up.ndim != 3 or down.ndim != 3 or indices.ndim != 2:
        given = f"x {list(x.shape)}, indices {list(indices.shape)}, up {list(up.shape)}, down {list(down.shape)}"
        raise LayoutError(f"experts takes x [T, D], indices [T, K], up [E, O, D] and down [E, D, I], got {given}")
    (tokens, width), (count, _, inner), top_k = x.shape, down.shape, indices.shape[1]
    stored = up_scales is not None or down_scales is not None
    a_byte = 2 if stored else 1
    inner *= a_byte
    outer = 2 * inner if activation.gated else inner
    operands: _Operands = {
        "indices": (indices, (tokens, top_k)),
        "weights": (weights, (tokens, top_k)),
        "up": (up, (count, outer, width // a_byte)),
        "down": (down, (count, width, inner // a_byte)),
        "up_bias": (up_bias, (count, outer)),
        "down_bias": (down_bias, (count, width)),
    }
    for name, adapter, n, k in (("up_adapter", up_adapter, outer, width), ("down_adapter", down_adapter, width, inner)):
        if adapter is not None:
            rank = adapter.a.shape[1] if adapter.a.ndim == 3 else 0
            operands[f"{name}.a"] = (adapter.a, (count, rank, k))
            operands[f"{name}.b"] = (adapter.b, (count, n, rank))
    if stored:
        if up_scales is None or down_scales is None:
            raise LayoutError("up and down are both in MXFP4 or neither: pass the scales of both")
        operands["up_scales"] = (up_scales, (count, outer, width // GROUP))
        operands["down_scales"] = (down_scales, (count, width, inner // GROUP))
    _check_operands(x, operands)
    if not 1 <= top_k <= count:
        raise LayoutError(f"each token chooses {top_k} experts and there are {count}: choose from 1 to all of them")
    if indices.dtype not in (torch.int32, torch.int64):
        raise LayoutError(f"indices are int32 or int64, got {indices.dtype}: cast them, indices.int()")
    if interleaved and not activation.gated:
        raise LayoutError("interleaved gates need an activation with gates: leave interleaved out")
    if not (x.is_floating_point() and weights.is_floating_point()):
        raise LayoutError(f"x and weights must be floating-point, got {x.dtype} and {weights.dtype}")
    if indices.device.type == "cpu" and indices.numel() and not torch.compiler.is_compiling():
        _check_indices(indices, count)
    ranks = tuple(0 if adapter is None else adapter.a.shape[1] for adapter in (up_adapter, down_adapter))
    unit = max(1, 16 // x.element_size())
    return ExpertsRequest(
        tokens=tokens,
        width=width,
        inner=inner,
        experts=count,
        top_k=top_k,
        dtype=x.dtype,
        device=x.device,
        activation=activation,
        interleaved=interleaved,
        biases=up_bias is not None or down_bias is not None,
        ranks=(ranks[0], ranks[1]),
        aligned=not (width % unit or inner % unit) and (stored or all(_strided(w, unit) for w in (up, down))),
        stored="MXFP4" if stored else "",
    )


def _check_operands(x: Tensor, operands: _Operands) -> None:
    """Raises if an operand has another shape than it must have, or another device or dtype than x."""
    given = {name: (tensor, shape) for name, (tensor, shape) in operands.items() if tensor is not None}
    packed = {"up", "down", "up_scales", "down_scales"} if "up_scales" in given else set()
    for name, (tensor, shape) in given.items():
        if tensor.shape != shape:
            raise LayoutError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    for name, (tensor, _) in given.items():
        if tensor.device != x.device:
            raise LayoutError(f"{name} is on {tensor.device} and x on {x.device}: move both to one device")
        if name in packed and tensor.dtype != torch.uint8:
            raise LayoutError(f"{name} is {tensor.dtype}, and weights in MXFP4 are uint8: leave their scales out")
        if name not in ("indices", "weights") and name not in packed and tensor.dtype != x.dtype:
            raise LayoutError(f"{name} is {tensor.dtype} and x {x.dtype}: give both one dtype")


def _strided(weight: Tensor, unit: int) -> bool:
    """Returns whether a weight has one axis without gaps and others in multiples of ``unit``."""
    return 1 in weight.stride()[1:] and all(s == 1 or s % unit == 0 for s in weight.stride())


def _check_indices(indices: Tensor, count: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(indices, FakeTensor) or indices.is_meta:
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < -1 or highest > count:
        wrong = lowest if lowest < -1 else highest
        raise LayoutError(
            f"an index names expert {wrong} and there are {count}: indices are 0 to {count - 1}, and -1 or {count} for "
            "no expert"
        )
