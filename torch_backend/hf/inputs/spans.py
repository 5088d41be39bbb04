"""Every rule about tokens that see each other both ways: images of Gemma, the prefix of PaliGemma.

The kinds of a batch's tokens and its segments -> :func:`add_spans` -> the segments with their spans, on which packed
attention is causal "or in the same span". Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from torch_backend.hf.anatomy.families import PIXELS, both_ways_of
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.inputs.arguments import UNPACKED, place_of
from torch_backend.hf.inputs.guard import Guard
from torch_backend.segments import PackedMetadata, to_device


def add_spans(root: Any, kwargs: Mapping[str, Any], forward: PackedForward, guard: Guard) -> None:
    """Give a packed forward the spans of its batch; it stays as it is where attention is causal throughout.

    Args:
        root: the model; the config of its family says which tokens see each other.
        kwargs: the arguments of the call.
        forward: of the call; ``segments`` and ``layers_of_spans`` are set.
        guard: see :meth:`Guard.check`.

    Raises:
        LayoutError: the kinds have another shape than the tokens, or a prefix does not begin its document.
        UnsupportedModelError: images or a prefix came without kinds, kinds without images, or a span is too long.
    """
    found, name = both_ways_of(root.config), type(root).__name__
    if found is None:
        return
    kinds = kwargs.get(found.key)
    images = any(kwargs.get(name) is not None for name in PIXELS)
    if kinds is None:
        if images or found.prefix:
            raise UnsupportedModelError(
                f"a packed batch came without {found.key}, by which {name} knows the tokens that "
                "see each other in both directions: pass what the processor returns"
            )
        return
    packed = forward.segments
    if kinds.numel() != packed.tokens:
        raise LayoutError(f"{found.key} must have the shape of input_ids, got {list(kinds.shape)}")
    width, kinds = kinds.shape[-1], to_device(kinds, packed.device).reshape(-1)
    if not images and not found.prefix:
        _refuse_marks(name, found.key, kinds, width, guard)
        return
    numbers = -1 + torch.stack([kinds == kind for kind in found.kinds]).any(0).int()
    if found.prefix:
        _refuse_gaps(found.key, numbers, packed, width, guard)
    forward.segments, forward.layers_of_spans = packed.with_spans(numbers), found.layers
    _refuse_long_spans(root, forward.segments, width, guard)


def _refuse_marks(name: str, key: str, kinds: Tensor, width: int, guard: Guard) -> None:
    def error(i: int) -> PackingError:
        return UnsupportedModelError(
            f"a packed batch came with {key} other than 0 ({place_of(i, width)}) and without pixel_values: {name} lets "
            f"these tokens see each other in both directions where they are those of an image; {UNPACKED}"
        )

    guard.check(key, lambda: kinds != 0, error)


def _refuse_gaps(key: str, numbers: Tensor, packed: PackedMetadata, width: int, guard: Guard) -> None:
    def find() -> Tensor:
        same = packed.seq_idx[1:] == packed.seq_idx[:-1]
        return (numbers[1:] == 0) & (numbers[:-1] != 0) & same

    def error(i: int) -> PackingError:
        return LayoutError(
            f"{key} returns to the prefix inside a document ({place_of(i + 1, width)}): "
            "a prefix is the document's first tokens"
        )

    guard.check(f"{key} of a prefix", find, error)


def _refuse_long_spans(root: Any, packed: PackedMetadata, width: int, guard: Guard) -> None:
    """Refuse spans longer than the window: versions and families differ in what a window hides inside a span."""
    config = root.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None or "sliding_attention" not in (getattr(config, "layer_types", None) or ("sliding_attention",)):
        return
    spans = packed.spans
    assert spans is not None

    def error(i: int) -> PackingError:
        return UnsupportedModelError(
            f"more than {window:,} tokens see each other in both directions at {place_of(i, width)}, and the sliding "
            f"window of {type(root).__name__} is {window:,} tokens: make images smaller, or the prefix shorter"
        )

    guard.check("longest span", lambda: spans.end - spans.begin > window, error)
