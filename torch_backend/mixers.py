"""Layers that carry something along the row, run document by document.

A state-space, linear-attention or convolution layer carries its state along the row. In a packed forward such a layer
(projections, convolution, scan) runs on padded batches of documents of similar length (:mod:`torch_backend.documents`),
so whatever it does inside, in plain torch or in a fused kernel, it does inside one document; what convolves there is
chosen by :mod:`torch_backend.convolution`. Without segments its own ``forward`` runs untouched. A whole decoder can be
wrapped in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from torch_backend.carry import CarriedMask
from torch_backend.convolution import packed_forward
from torch_backend.documents import from_batches, to_batches
from torch_backend.metadata import PackedMetadata

# Layers that carry something along the row and have no convolution to know them by.
BY_NAME: dict[str, Callable[[Any], bool]] = {
    "MiniMaxLightningAttention": lambda layer: True,
    "JambaMambaDecoderLayer": lambda layer: True,  # does not tell its mixer of segments
    "Llama4TextAttention": lambda layer: layer.attn_temperature_tuning and not layer.use_rope,  # counts along the row
}


def no_mask(rows: Tensor) -> None:
    """The mask of a batch [n, L, ...] for a layer that needs none."""


_BEFORE = "_crosspack_forward"


def find_mixers(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The layers inside ``module`` that carry something along the row, by name, the outermost ones only.

    They have a convolution of their own, or are known by name.
    """
    found = {}
    for name, child in module.named_children():
        convolves = any(isinstance(inner, nn.Conv1d) for inner in child.children())
        if convolves or BY_NAME.get(type(child).__name__, lambda layer: False)(child):
            found[prefix + name] = child
        else:
            found |= find_mixers(child, f"{prefix}{name}.")
    return found


def wrap(layer: nn.Module, *, mask: Callable[[Tensor], Any] = no_mask, pad: bool = True) -> None:
    """Make ``layer`` run document by document where it is given segments, by themselves or as a CarriedMask.

    Args:
        layer: a module whose first tensor argument is [B, S, ...] and whose forward is causal along S.
        mask: what the layer takes in the place of the CarriedMask, for a batch of documents [n, L, ...].
        pad: batch documents of similar length with padding at their end; else only those of the same length.
    """
    layer.__dict__[_BEFORE] = layer.__dict__.get("forward")  # accelerate, for one, wraps forward like this too
    layer.forward = partial(_forward, layer, mask, pad)


def unwrap(layer: nn.Module) -> None:
    """Take back what :func:`wrap` did."""
    before = layer.__dict__.pop(_BEFORE)
    if before is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = before


def _forward(layer: nn.Module, mask: Callable[[Tensor], Any], pad: bool, *args: Any, **kwargs: Any) -> Any:
    before = layer.__dict__[_BEFORE]
    told = [value for value in (*args, *kwargs.values()) if isinstance(value, CarriedMask | PackedMetadata)]
    if not told:
        return (before or partial(type(layer).forward, layer))(*args, **kwargs)
    packed = told[0].packed if isinstance(told[0], CarriedMask) else told[0]
    kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, PackedMetadata)}
    packed.served[id(layer)] = "per document"
    before = before or partial(packed_forward(type(layer).forward), layer)
    return per_document(packed, before, args, kwargs, mask=mask, pad=pad)


def per_document(
    packed: PackedMetadata,
    layer: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mask: Callable[[Tensor], Any] = no_mask,
    pad: bool = True,
) -> Any:
    """``layer(*args, **kwargs)`` as if every document were in a batch of its own.

    Args:
        packed: the segments of [B, S] tokens.
        layer: causal along its second axis.
        args, kwargs: its arguments; every tensor [B, S, ...] among them, in tuples too, is split into documents.
        mask, pad: as for :func:`wrap`.

    Returns:
        What the layer returns, every tensor [B, S, ...] put together again and tensors of other shapes (states) None.
    """
    values = [*args, *kwargs.values()]
    first = next(x for x in values if isinstance(x, Tensor))
    rows, length = first.shape[:2]
    batches = to_batches(packed, first.flatten(0, 1), pad=pad)

    def split(value: Any) -> list[Any]:
        if isinstance(value, CarriedMask):
            return [mask(batch) for batch in batches]
        if isinstance(value, Tensor) and value.shape[:2] == (rows, length):
            return to_batches(packed, value.flatten(0, 1), pad=pad)
        if isinstance(value, tuple):
            return list(zip(*map(split, value), strict=True))
        return [value] * len(batches)

    def join(parts: tuple[Any, ...]) -> Any:
        if isinstance(parts[0], tuple):
            return tuple(join(part) for part in zip(*parts, strict=True))
        if hasattr(parts[0], "to_tuple"):  # a ModelOutput of transformers
            return type(parts[0])(**{name: join(tuple(part[name] for part in parts)) for name in parts[0]})
        if all(isinstance(p, Tensor) and p.shape[:2] == b.shape[:2] for p, b in zip(parts, batches, strict=True)):
            return from_batches(packed, parts, pad=pad).reshape(rows, length, *parts[0].shape[2:])
        return None

    results = []
    for call in zip(*map(split, values), strict=True):
        named = dict(zip(kwargs, call[len(args) :], strict=True))
        results.append(layer(*call[: len(args)], **named))
    return join(tuple(results))
