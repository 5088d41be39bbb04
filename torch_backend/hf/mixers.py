"""Layers that carry something along the row: state-space, linear-attention and convolution layers in packed forwards.

A layer whose forward mixes tokens only through functions that are known by name (transformers' short convolution and
scans) runs once on the whole row, projections, norms and gates as they are, and these functions are told of the
segments (:mod:`.rebinding`, :mod:`.convolution`, :mod:`torch_backend.ops.scan`). Any other layer
runs as a whole on padded batches of documents of similar length (:mod:`torch_backend.ops.documents`), so whatever it
does inside, it does inside one document. Without segments a layer's own ``forward`` runs untouched. A whole decoder
can be wrapped in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.hf import convolution
from torch_backend.hf.carry import CarriedMask
from torch_backend.hf.rebinding import called, names, rebound, segments
from torch_backend.ops.documents import FINE, OWN, no_mask, per_document
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.scan import LIBRARIES, ScanRequest, scan
from torch_backend.segments import PackedMetadata

# Layers that carry something along the row and have no convolution to know them by.
BY_NAME: dict[str, Callable[[Any], bool]] = {
    "MiniMaxLightningAttention": lambda layer: True,
    "JambaMambaDecoderLayer": lambda layer: True,  # does not tell its mixer of segments
    "Llama4TextAttention": lambda layer: layer.attn_temperature_tuning and not layer.use_rope,  # counts along the row
}
# Global names of functions in modeling files: those without effect across tokens, those that only a cache leads to, and
# those that do several steps at once and may return None, upon which the layer takes the steps one by one.
_WITHIN_TOKENS = ("apply_mask_to_padding_states",)
_WITH_A_CACHE = (
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
)
_AT_ONCE = ("mamba2_split_conv1d_scan_combined",)
# Likewise methods of a layer.
_METHODS = ("fix_query_key_value_ordering",)

_BEFORE, _ON_ROW, _DIVIDED = "_crosspack_forward", "_crosspack_forward_on_row", "_crosspack_forward_divided"


@dataclass(frozen=True)
class Row:
    """How a layer ran: on the whole row.

    Attributes:
        kernel: whether its convolution is a kernel's; else it runs on batches of documents.
        scan: what it asked of a scan, None if it has none.
    """

    kernel: bool
    scan: ScanRequest | None

    @property
    def needs_lengths(self) -> bool:
        """Whether something in it needs the segments' lengths on the host."""
        return not self.kernel or (self.scan is not None and self.scan.refused is not None)

    def __str__(self) -> str:
        convolution = f"convolution by {'Triton' if self.kernel else 'plain torch on batches of documents'}"
        return convolution if self.scan is None else f"{convolution}, {self.scan}"


PER_DOCUMENT = "per document"


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
    """Keep documents apart in ``layer`` where it is given segments, by themselves or as a CarriedMask.

    Args:
        layer: a module whose first tensor argument is [B, S, ...] and whose forward is causal along S.
        mask: what a layer that runs on batches of documents takes in the place of the CarriedMask, for [n, L, ...].
        pad: batch documents of similar length with padding at their end; else only those of the same length.
    """
    layer.__dict__[_BEFORE] = layer.__dict__.get("forward")  # accelerate, for one, wraps forward like this too
    layer.__dict__[_DIVIDED] = {"mask": mask, "sizes": FINE if pad else OWN}
    layer.__dict__[_ON_ROW] = row_forward(type(layer))
    # a method and no partial: torch.compile guards a method by its function, so equal layers share one graph
    layer.forward = MethodType(_forward, layer)


def unwrap(layer: nn.Module) -> None:
    """Take back what :func:`wrap` did."""
    before = layer.__dict__.pop(_BEFORE)
    del layer.__dict__[_DIVIDED], layer.__dict__[_ON_ROW]
    if before is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = before


def row_forward(layer_class: type[nn.Module]) -> Callable[..., Any] | None:
    """A layer class's forward for whole rows, which is told of the segments by a keyword; None if it has to be divided.

    It convolves by name, and every other function and method that it names is known.
    """
    functions, known = called(layer_class.forward), {*_WITHIN_TOKENS, *_WITH_A_CACHE, *_AT_ONCE, *LIBRARIES}
    if convolution.NAME not in functions or functions.keys() - known - {convolution.NAME}:
        return None
    if any(_is_method(layer_class, name) for name in names(layer_class.forward) if name not in _METHODS):
        return None
    return _told_of_segments(layer_class.forward, tuple(sorted(functions.items())))


@cache
def _told_of_segments(forward: Callable[..., Any], functions: tuple[tuple[str, Any], ...]) -> Callable[..., Any] | None:
    """``forward`` over stand-ins for those of its functions that mix tokens."""
    stand_ins: dict[str, Any] = {}
    for name, function in functions:
        if name == convolution.NAME:
            stand_ins[name] = partial(convolution.convolve, function)
        elif name in LIBRARIES:
            stand_ins[name] = partial(scan, function, LIBRARIES[name])
        elif name in _AT_ONCE:
            stand_ins[name] = _step_by_step
    return rebound(forward, stand_ins)


def _is_method(layer_class: type[nn.Module], name: str) -> bool:
    return inspect.isfunction(getattr(layer_class, name, None)) and not hasattr(nn.Module, name)


def _step_by_step(*args: Any, **kwargs: Any) -> None:
    """Stands for a function of convolution and scan at once."""


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    before = layer.__dict__[_BEFORE]
    told = [value for value in (*args, *kwargs.values()) if isinstance(value, CarriedMask | PackedMetadata)]
    if not told:
        return (before or partial(type(layer).forward, layer))(*args, **kwargs)
    packed = told[0].packed if isinstance(told[0], CarriedMask) else told[0]
    whole = layer.__dict__[_ON_ROW]
    if whole is not None and before is None and segments(kwargs.values()) is not None:
        packed.last_request = None
        args = tuple(None if isinstance(value, CarriedMask) else value for value in args)
        kwargs = {name: None if isinstance(value, CarriedMask) else value for name, value in kwargs.items()}
        result = whole(layer, *args, **kwargs)
        if not torch.compiler.is_compiling():  # a compiled layer would be guarded on its own id, one graph per layer
            hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            packed.served[id(layer)] = Row(runs_triton(hidden), packed.last_request)
        return result
    packed.served[id(layer)] = PER_DOCUMENT
    kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, PackedMetadata)}
    before = before or partial(type(layer).forward, layer)
    return per_document(packed, before, args, kwargs, **layer.__dict__[_DIVIDED])
