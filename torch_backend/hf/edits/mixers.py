"""Layers that carry state along the row: state-space, linear-attention and convolution layers in packed forwards.

A layer whose forward mixes tokens only through functions that are known by name (transformers' short convolution and
scans) runs once on the whole row, with its projections, norms and gates as they are; in a copy of its forward these
names mean the functions of :mod:`.stand_ins`, which receive the segment boundaries. Any other layer runs as a whole on
padded batches of documents of similar length. A whole decoder can be run the same way.
Where segments continue others, a layer on the row hands the convolution's last tokens and the scan's state on from
parent to child (:mod:`torch_backend.ops.forests`); any other runs on the path to each segment as a document of its own,
so its state at a segment's start is the one in which the parent ends. Calls without segments run the layer's own
forward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.context_parallel.recurrent import WHOLE, run_whole
from torch_backend.hf.anatomy.families import (
    CONVOLUTION,
    FUSED_STEPS,
    MASK_PADDING,
    ONLY_WITH_A_CACHE,
    SCANS,
    SELECTIVE_SCAN,
    WITHIN_TOKENS,
    WITHIN_TOKENS_METHODS,
)
from torch_backend.hf.anatomy.layers import passes_on, uses_interface
from torch_backend.hf.attention import causal_mask
from torch_backend.hf.edits.row_layers import FORWARDS, with_fast_norms, without_triton
from torch_backend.hf.edits.stand_ins import LayerSegments, convolve, no_fused_steps, scan, selective_scan
from torch_backend.hf.entry import run_with
from torch_backend.hf.forward import CARRIED, DocumentsChoice, PackedForward, RowChoice, forward_among
from torch_backend.hf.override import LayerOverride, called, has_own_forward, names, original_class, rebound
from torch_backend.ops.document_batches import RealTokens
from torch_backend.ops.operators import runs_triton
from torch_backend.segments import PackedMetadata

logger = logging.getLogger(__name__)

# of a layer: its forward on a row; whether that is ours; whether it calls its scan without segments; whether it passes
# on keywords that it does not know
_ROW_FORWARD, _OURS = "_crosspack_row_forward", "_crosspack_row_is_ours"
_SCANS_ALONE, _TAKES_OTHERS = "_crosspack_scans_alone", "_crosspack_takes_others"


def mixer_edits(decoder: nn.Module, mixers: Iterable[nn.Module], others: Container[int]) -> Iterator[LayerOverride]:
    """The edits of layers that restart at every segment in packed calls, and of those that pass the segments on.

    Args:
        decoder: whose layers they are.
        mixers: run on the row where they can, else per document.
        others: ids of layers that have another edit.
    """
    for mixer in mixers:
        if id(mixer) not in others:
            yield LayerOverride(mixer, _mixer_forward, _row_attributes)
            reason = why_not_on_the_row(mixer)
            if reason is not None and CONVOLUTION in called(original_class(mixer).forward):
                _warn_once(type(mixer).__name__, reason)
    for layer in decoder.modules():
        if passes_on(layer) and id(layer) not in others:
            yield LayerOverride(layer, segments_passed_on)


def why_not_on_the_row(layer: nn.Module) -> str | None:
    """Explains why a layer runs per document, None if it runs on the row."""
    if has_own_forward(layer):
        return "somebody set a forward on this instance, which may do anything"
    on_row = row_forward(original_class(layer))
    if isinstance(on_row, str):
        return on_row
    reason = without_triton(layer)
    return None if reason is None else f"its scan has no kernel: {reason}"


def row_forward(layer_class: type[nn.Module]) -> Callable[..., Any] | str:
    """A layer class's forward for whole rows; the segments reach it as a keyword. If it has none, the reason.

    It convolves by name, and every other function and method that it names is known.
    """
    functions = called(layer_class.forward)
    if layer_class.__name__ in FORWARDS:
        return FORWARDS[layer_class.__name__]
    if CONVOLUTION not in functions:
        return f"it does not convolve through {CONVOLUTION}"
    allowed = {*WITHIN_TOKENS, *ONLY_WITH_A_CACHE, *FUSED_STEPS, *SCANS, SELECTIVE_SCAN, CONVOLUTION}
    methods = {name for name in names(layer_class.forward) if _is_method(layer_class, name)}
    unknown = sorted((functions.keys() - allowed) | (methods - set(WITHIN_TOKENS_METHODS)))
    if unknown:
        return f"its forward calls {', '.join(unknown)}, which may mix tokens"
    return (
        _rebound_row_forward(layer_class.forward, tuple(sorted(functions.items()))) or "a decorator hides its forward"
    )


@cache
def _rebound_row_forward(
    forward: Callable[..., Any], functions: tuple[tuple[str, Any], ...]
) -> Callable[..., Any] | None:
    """``forward`` with stand-ins for those of its functions that mix tokens."""
    stand_ins: dict[str, Any] = {}
    for name, function in functions:
        if name == CONVOLUTION:
            stand_ins[name] = partial(convolve, function)
        elif name in SCANS:
            stand_ins[name] = partial(scan, name, function, SCANS[name])
        elif name == SELECTIVE_SCAN:
            stand_ins[name] = selective_scan
        elif name in FUSED_STEPS:
            stand_ins[name] = no_fused_steps
    return rebound(forward, stand_ins)


def _is_method(layer_class: type[nn.Module], name: str) -> bool:
    return inspect.isfunction(getattr(layer_class, name, None)) and not hasattr(nn.Module, name)


def _row_attributes(original: type[nn.Module]) -> dict[str, Any]:
    """Returns the class attributes that a packed call reads; found here because a compiler would trace the search."""
    on_row = row_forward(original)
    parameters = inspect.signature(original.forward).parameters.values()
    return {
        _ROW_FORWARD: None if isinstance(on_row, str) else on_row,
        _OURS: original.__name__ in FORWARDS,
        _SCANS_ALONE: SELECTIVE_SCAN in called(original.forward),
        _TAKES_OTHERS: any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    }


def _mixer_forward(layer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward = forward_among((*args, *kwargs.values()))
    if forward is None:
        return call(*args, **kwargs)
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    reason = _why_not_now(layer, kwargs, hidden.dtype)
    if forward.segments.parents is not None and reason is not None:
        return forward.over_documents(partial(_mixer_forward, layer, call), args, kwargs)
    if forward.context is not None and reason is not None:
        return _run_whole(layer, forward, call, args, kwargs)
    if reason is not None:
        forward.record(layer, DocumentsChoice(reason))
        mask = partial(causal_mask, layer) if uses_interface(original_class(layer)) else _no_mask
        return forward.per_document(call, args, kwargs, mask=mask)
    segments = LayerSegments(forward.segments, forward.context)
    result = _run_on_row(layer, forward, segments, args, kwargs)
    if not torch.compiler.is_compiling():
        convolves = any(isinstance(inner, nn.Conv1d) for inner in layer.children())
        forward.record(layer, RowChoice(runs_triton(hidden) if convolves else None, segments.scan, segments.crossing))
    return result


@torch.compiler.disable  # the documents of a rank differ from batch to batch
def _run_whole(
    layer: nn.Module, forward: PackedForward, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A layer whose straddling documents run as a whole, each on one rank of those over which documents are cut."""
    assert forward.context is not None
    others: list[Any] = []

    def on_documents(packed: PackedMetadata, values: list[Any]) -> Tensor:
        inner = PackedForward(packed, (1, packed.tokens), forward.implementation, sizes=forward.sizes)
        inner.choices = forward.choices
        values = [inner if isinstance(value, PackedForward) else value for value in values]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        output = _mixer_forward(layer, call, *values[: len(args)], **named)
        out, *others[:] = output if isinstance(output, tuple) else (output,)
        return out

    out = run_whole(forward.context, [*args, *kwargs.values()], on_documents)
    choice = forward.choices.get(id(layer))
    if isinstance(choice, DocumentsChoice) and forward.context.straddles:
        forward.record(layer, replace(choice, crossing=WHOLE))
    return (out, *others) if others else out


def _why_not_now(layer: nn.Module, kwargs: dict[str, Any], dtype: torch.dtype) -> str | None:
    """Explains why this call does not run on the row, None if it does."""
    of_class = layer.__dict__
    if of_class[_ROW_FORWARD] is None or has_own_forward(layer):
        return "its forward may mix tokens" if torch.compiler.is_compiling() else why_not_on_the_row(layer)
    if of_class[_OURS] or of_class[_SCANS_ALONE]:
        reason = without_triton(layer, dtype)
        if reason is not None:
            return f"its scan has no kernel: {reason}"
    reaches = of_class[_OURS] or of_class[_TAKES_OTHERS] or any(name in kwargs for name in CARRIED)
    return None if reaches else "no keyword hands it the segments"


def _run_on_row(
    layer: nn.Module, forward: PackedForward, segments: LayerSegments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    on_row = layer.__dict__[_ROW_FORWARD]
    if layer.__dict__[_OURS]:
        return on_row(layer, segments, *args, **kwargs)
    if not any(name in kwargs for name in CARRIED):
        kwargs = kwargs | {CARRIED[0]: forward}
    args = tuple(None if isinstance(value, PackedForward) else value for value in args)
    kwargs = {
        name: (segments if name in CARRIED else None) if isinstance(value, PackedForward) else value
        for name, value in kwargs.items()
    }
    if layer.__dict__[_SCANS_ALONE]:
        on_row = partial(run_with, "segments", segments, on_row)
    return on_row(with_fast_norms(layer), *args, **kwargs)


def segments_passed_on(layer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of such a layer with the segments in place of its argument."""
    forward, name = forward_among(kwargs.values()), passes_on(layer)
    return call(*args, **kwargs) if forward is None or name is None else call(*args, **kwargs | {name: forward})


def run_per_document(
    decoder: nn.Module, forward: PackedForward, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A packed call of a decoder, which runs as a whole on batches of documents; ``call`` is its own forward."""
    forward.record(decoder, DocumentsChoice("its attention cannot be given segments from outside"))
    config: Any = decoder.config
    if config.model_type in MASK_PADDING:
        kwargs = {**kwargs, "attention_mask": RealTokens()}
    return forward.per_document(call, args, kwargs, mask=_no_mask)


def _no_mask(rows: Tensor) -> None:
    return None


@cache
def _warn_once(layer: str, reason: str) -> None:
    logger.warning("%s runs on batches of documents instead of whole rows, which costs speed: %s", layer, reason)
