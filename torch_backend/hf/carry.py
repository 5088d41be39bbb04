"""How a batch's segments travel: from the collator's keys to one metadata object, and from there to every layer.

``cu_seq_lens_q``, ``max_length_q``, ``packed_lengths`` (what a batch holds) -> :func:`metadata_of` -> PackedMetadata ->
:class:`CarriedMask`, which stands where an attention mask would and so reaches every layer as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from packing_core.errors import LayoutError, UnsupportedModelError
from torch_backend.segments import PackedMetadata, to_device

# What a packed batch holds beside input_ids, labels and position_ids.
METADATA_KEYS = (
    "packed_lengths",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)


class CarriedMask(BlockMask):
    """The metadata in the place of a 4-D attention mask.

    transformers hands a mask of four dimensions on to every layer as it is, be it a tensor or a ``BlockMask``; being
    the latter and no tensor, this one is neither cast nor split nor detached on the way, by nobody.
    """

    def __init__(self, packed: PackedMetadata, shape: tuple[int, int], implementation: str | tuple[str, ...]) -> None:
        self.packed = packed
        self.implementation = implementation
        self._shape = (shape[0], 1, shape[1], shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> CarriedMask:
        """Itself. Gemma 4 selects the queries of its last layers: all of them, or those of ``logits_to_keep``."""
        parts = index if isinstance(index, tuple) else (index,)
        full = [isinstance(p, slice) and p.indices(n) == (0, n, 1) for p, n in zip(parts, self._shape, strict=False)]
        if not all(full):
            raise UnsupportedModelError("a packed forward computes all logits: leave logits_to_keep out")
        return self

    def __repr__(self) -> str:
        return f"CarriedMask({list(self._shape)}, {self.packed.tokens} tokens)"

    __str__ = __repr__


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether the batch carries its segments."""
    return any(batch.get(key) is not None for key in ("packed_lengths", "cu_seq_lens_q"))


def take_metadata(
    batch: MutableMapping[str, Any], *, rows: int, row_length: int, device: torch.device, host_lengths: bool
) -> PackedMetadata:
    """Remove the metadata keys from ``batch``, which :func:`is_packed`, and return what they say.

    Args:
        batch: keyword arguments of a model.
        rows, row_length: the shape of ``input_ids``.
        device: where the model computes.
        host_lengths: whether the implementation needs lengths on the host. If ``packed_lengths`` is not in the batch
            they are read from ``cu_seq_lens_q``, which waits for the device if it lies there.

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
