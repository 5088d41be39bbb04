"""Weights in MXFP4, as gpt-oss is published: 4 bits a value, and a power of two for each 32 of them.

blocks uint8 [..., G, 16] or [..., 16 G], two values a byte, the lower bits first; scales uint8 [..., G], exponents
plus 127 -> :func:`dequantize` -> values [..., 32 G], with the bits of transformers' ``convert_moe_packed_tensors``.
:class:`Mxfp4Weight` is a frozen parameter of them in the shape, and under the name, that the values would have.
"""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_backend.ops.operators import operator, runs_triton

GROUP = 32  # values with one scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 256  # groups of a program
_PART = 2**18  # groups at a time, without Triton


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values [..., 32 G] of a weight; blocks [..., 16 G], scales [..., G]."""
    values: Tensor = _dequantize(blocks, scales, dtype)
    return values


class _SharedValues:
    """Memory for the values of one weight at a time, shared by all weights on a device while one of them lives.

    The allocator would keep such a block for steps as usual and another one for graphs, and put small tensors into it.
    Graphs of two models write into the same block: replay them on one stream.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []  # graphs write into the smaller ones too
        self.stream: torch.cuda.Stream | None = None

    def take(self, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        buffer = next((x for x in self.buffers if x.nbytes >= size), None)
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self.buffers.append(buffer)
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            before, self.stream = self.stream, torch.cuda.current_stream(device)
            if before not in (None, self.stream):
                self.stream.wait_stream(before)
        return buffer[:size].view(dtype).view(shape)


_SHARED: WeakValueDictionary[torch.device, _SharedValues] = WeakValueDictionary()


def shared_values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what :func:`dequantize` does, valid until the next call on the device: inside of operators alone."""
    shared = _SHARED.get(blocks.device)
    return _launch(blocks, scales, dtype, None if shared is None else shared.take(blocks.device, _shape(scales), dtype))


def shared_bytes(device: torch.device) -> int:
    """Returns the bytes that :func:`shared_values` holds on a device."""
    shared = _SHARED.get(device)
    return 0 if shared is None else sum(x.nbytes for x in shared.buffers)


def _shape(scales: Tensor) -> tuple[int, ...]:
    return *scales.shape[:-1], GROUP * scales.shape[-1]


def _launch(blocks: Tensor, scales: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    blocks, scales = blocks.contiguous(), scales.contiguous()
    out = torch.empty(_shape(scales), dtype=dtype, device=blocks.device) if out is None else out
    if runs_triton(out):
        from torch_backend.ops import mxfp4_kernels as kernels

        kernels.dequantize[-(-scales.numel() // _BLOCK),](blocks, scales, out, scales.numel(), _BLOCK, num_warps=4)
        return out
    table = torch.tensor([*_VALUES, *(-x for x in _VALUES)], dtype=dtype, device=blocks.device)
    parts = blocks.view(-1, GROUP // 2).split(_PART), scales.view(-1, 1).split(_PART), out.view(-1, GROUP).split(_PART)
    for packed, exponents, into in zip(*parts, strict=True):
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()
        torch.ldexp(table[codes], exponents.int() - 127, out=into)
    return out


_dequantize = operator(
    "dequantize_mxfp4(Tensor blocks, Tensor scales, ScalarType dtype) -> Tensor",
    _launch,
    lambda blocks, scales, dtype: blocks.new_empty(*blocks.shape[:-1], 2 * blocks.shape[-1], dtype=dtype),
)


class Mxfp4Weight(torch.Tensor):
    """A frozen parameter [E, in, out] that holds blocks [E, out, in / 2] and scales [E, out, in / 32].

    PEFT, optimizers and ``state_dict`` find it where the values would be. An operation on it gets the values, made for
    that operation alone; what moves or copies the whole weight keeps the 4 bits.
    """

    blocks: Tensor
    scales: Tensor
    shared: _SharedValues  # which lives as long as a weight

    @staticmethod
    def __new__(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Mxfp4Weight:
        """Takes blocks [E, out, in / 2], or [E, out, in / 32, 16] as checkpoints have them; values are ``dtype``."""
        count, out, groups = scales.shape
        weight: Mxfp4Weight = torch.Tensor._make_wrapper_subclass(
            cls, (count, GROUP * groups, out), dtype=dtype, device=blocks.device
        )
        weight.blocks, weight.scales = blocks.reshape(count, out, -1), scales
        weight.shared = _SHARED.setdefault(blocks.device, _SharedValues())
        return weight

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the values [E, in, out], without gaps along ``in``."""
        return dequantize(self.blocks, self.scales, dtype or self.dtype).mT

    @property
    def nbytes(self) -> int:  # type: ignore[override] # an attribute in torch's stubs
        """Returns the bytes of blocks and scales."""
        return self.blocks.nbytes + self.scales.nbytes

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["blocks", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, *_: Any) -> Mxfp4Weight:
        return Mxfp4Weight(inner["blocks"], inner["scales"], dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.blocks, self.scales, self.dtype, isinstance(self, torch.nn.Parameter))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, aten = kwargs or {}, torch.ops.aten
        weight = args[0] if args else None
        if isinstance(weight, Mxfp4Weight):
            if func in (aten.detach.default, aten.alias.default, aten.clone.default):
                apply = torch.Tensor.clone if func is aten.clone.default else torch.Tensor.detach
                return Mxfp4Weight(apply(weight.blocks), apply(weight.scales), weight.dtype)
            if func is aten._to_copy.default:
                device, dtype = kwargs.get("device"), kwargs.get("dtype") or weight.dtype
                return Mxfp4Weight(weight.blocks.to(device, copy=True), weight.scales.to(device, copy=True), dtype)
            if func is aten.select.int and args[1] == 0:
                return dequantize(weight.blocks[args[2]], weight.scales[args[2]], weight.dtype).mT.contiguous()
        args, kwargs = tree_map_only(Mxfp4Weight, lambda x: x.dequantize().contiguous(), (args, kwargs))
        if func._schema.is_mutable and isinstance(weight, Mxfp4Weight):
            if func is aten.copy_.default and torch.equal(*args[:2]):  # DDP sends the weights of rank 0 to the others
                return weight
            raise NotImplementedError(f"{func} cannot write into a weight in MXFP4, which is frozen")
        return func(*args, **kwargs)


def _rebuilt(blocks: Tensor, scales: Tensor, dtype: torch.dtype, is_parameter: bool) -> Tensor:
    weight = Mxfp4Weight(blocks, scales, dtype)
    return torch.nn.Parameter(weight, requires_grad=False) if is_parameter else weight
