"""Every rule about a batch: what marks it as packed, what its boundaries say, and what is refused.

Keyword arguments of a model -> :func:`is_packed` -> :func:`take_segments`, or :func:`refuse_unmarked` where a batch
looks packed and carries no boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError
from torch_backend.segments import PackedMetadata, to_device

PAGED_CACHE = "cache"
CACHES = ("past_key_values", "cache_params", PAGED_CACHE)
WAY_OUT = (
    "let PackedCollator build the batches, or wrap the present collator, torch_backend.with_boundaries(collator), "
    "which marks the boundaries that it hints at"
)
# What a packed batch holds beside input_ids, labels and position_ids.
METADATA_KEYS = (
    "packed_lengths",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that says how many rows and columns the batch has: ids, or embeddings in their place."""
    for candidate in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args):
        if isinstance(candidate, Tensor):
            return candidate
    raise LayoutError("the batch has neither input_ids nor inputs_embeds")


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether the batch carries its segments. The boundaries of continuous batching belong to its paged cache."""
    return batch.get(PAGED_CACHE) is None and any(
        batch.get(key) is not None for key in ("packed_lengths", "cu_seq_lens_q")
    )


def generates(batch: Mapping[str, Any]) -> bool:
    """Whether the batch is a step of generation, which reads a cache."""
    return any(batch.get(key) is not None for key in CACHES)


def take_segments(
    batch: MutableMapping[str, Any], *, rows: int, row_length: int, device: torch.device, host_lengths: bool
) -> PackedMetadata:
    """Remove the boundaries from ``batch``, which :func:`is_packed`, and return the segments that they mark.

    Args:
        batch: keyword arguments of a model.
        rows, row_length: the shape of ``input_ids``.
        device: where the model computes.
        host_lengths: whether something in the model needs lengths on the host. If ``packed_lengths`` is not in the
            batch they are then read from ``cu_seq_lens_q``, which waits for the device if it lies there.

    Raises:
        LayoutError: the keys contradict each other or the shape.
    """
    found = {key: batch.pop(key) for key in METADATA_KEYS if key in batch}
    tokens = rows * row_length
    lengths: Sequence[int] | None = found.get("packed_lengths")
    boundaries: Tensor | None = found.get("cu_seq_lens_q")
    longest: Any = found.get("max_length_q")
    if boundaries is not None:
        if torch.compiler.is_compiling() and not host_lengths:
            lengths = None  # values on the host would be compiled in, one graph per batch
        elif lengths is None and (host_lengths or longest is None or boundaries.device.type == "cpu"):
            lengths, boundaries = _read_lengths(boundaries, tokens), None
    if lengths is not None:
        _check(lengths, rows, row_length)
        if boundaries is None:
            return PackedMetadata.from_lengths(lengths, device=device)
    assert boundaries is not None
    if lengths is None:
        return PackedMetadata(to_device(boundaries.int(), device), int(longest), tokens)
    longest = max(lengths) if longest is None else int(longest)
    return PackedMetadata(to_device(boundaries.int(), device), longest, tokens, tuple(lengths))


def _read_lengths(boundaries: Tensor, tokens: int) -> list[int]:
    """Lengths of the segments that ``boundaries`` marks; tokens after the last one become segments of their own."""
    marks = boundaries.tolist()
    lengths = [end - start for start, end in pairwise(marks) if end != start]
    tail, longest = tokens - marks[-1], max(lengths, default=1)
    return lengths + [longest] * (tail // longest) + [tail % longest] * (tail % longest > 0)


def _check(lengths: Sequence[int], rows: int, row_length: int) -> None:
    ends = list(accumulate(lengths))
    if not ends or ends[-1] != rows * row_length:
        raise LayoutError(
            f"the segments hold {ends[-1] if ends else 0:,} tokens and input_ids {rows * row_length:,}: "
            "padding belongs to segments of its own, as PackedCollator gives it"
        )
    if rows > 1 and not set(range(row_length, ends[-1], row_length)).issubset(ends):
        raise LayoutError(f"a segment crosses from one row of {row_length:,} tokens into the next")


def refuse_unmarked(root: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise for a batch that looks packed and says nothing of its segments."""
    if generates(kwargs):
        return
    if kwargs.get("seq_idx") is not None:
        raise LayoutError(f"the batch has seq_idx but no cu_seq_lens_q: {WAY_OUT}")
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, Tensor) or torch.compiler.is_compiling():
        return
    if positions.device.type == "cpu":
        steps = positions[..., 1:] - positions[..., :-1]
        restarts = steps <= 0
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[-1] == positions.shape[-1]:
            restarts = restarts & (mask[..., 1:] != 0) & (mask[..., :-1] != 0)
        if bool(restarts.any()):
            raise LayoutError(f"position_ids restart inside a row but the batch carries no segments: {WAY_OUT}")
    elif root.training and mask is None:
        raise LayoutError(
            f"a training batch on {positions.device.type} came with position_ids and without segments, "
            f"attention_mask or cache, so whether it is packed cannot be told without reading it back: {WAY_OUT}"
        )
