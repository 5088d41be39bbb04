"""Rotary frequencies that depend on the longest position in the batch (dynamic NTK, longrope), chosen per document.

transformers takes the maximum of all ``position_ids``, so a short document packed with a long one would be turned by
the long one's frequencies. In a packed forward the rotary module runs once per document length instead, each time as if
it had seen nothing before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from packing_core.errors import UnsupportedModelError
from torch_backend.ops.documents import OWN, per_document
from torch_backend.segments import PackedMetadata

_BEFORE = "_crosspack_frequencies_before"


def find(decoder: nn.Module) -> dict[str, nn.Module]:
    """Rotary modules of ``decoder`` whose frequencies depend on the batch, by name.

    Raises:
        UnsupportedModelError: one of them sits inside a layer, where gradient checkpointing would run it again without
            knowing of segments.
    """
    found = {name: module for name, module in decoder.named_modules() if _depends_on_batch(module)}
    inside = [name for name in found if any(part.isdigit() for part in name.split("."))]
    if inside:
        raise UnsupportedModelError(
            f"{inside[0]} chooses its rotary frequencies from the longest position in the batch inside a layer: "
            "use rotary frequencies of a fixed kind (default, linear, yarn, llama3)"
        )
    return found


def wrap(rotary: nn.Module, running: Callable[[], PackedMetadata | None]) -> None:
    """Make a rotary module choose frequencies per document while ``running()`` says which segments the decoder runs."""
    rotary.__dict__[_BEFORE] = rotary.__dict__.get("forward")
    rotary.forward = partial(_forward, rotary, running)


def unwrap(rotary: nn.Module) -> None:
    """Take back what :func:`wrap` did."""
    before = rotary.__dict__.pop(_BEFORE)
    if before is None:
        del rotary.__dict__["forward"]
    else:
        rotary.__dict__["forward"] = before


def _depends_on_batch(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _forward(rotary: nn.Module, running: Callable[[], PackedMetadata | None], *args: Any, **kwargs: Any) -> Any:
    before = rotary.__dict__[_BEFORE] or partial(type(rotary).forward, rotary)
    packed = running()
    if packed is None:
        return before(*args, **kwargs)
    return per_document(packed, partial(_anew, rotary, before), args, kwargs, sizes=OWN)


def _anew(rotary: nn.Module, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``before`` without what the module remembers of longer documents."""
    for name in list(rotary.__dict__):
        if name.endswith("max_seq_len_cached"):
            setattr(rotary, name, 0)
    return before(*args, **kwargs)
