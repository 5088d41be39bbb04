"""fla's kernels on a packed row, and the list of chunks by which libraries find the segments of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_backend.segments import PackedMetadata

CHUNK = 64  # tokens of a document that the kernels take at once


def scan(packed: PackedMetadata, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """fla's kernels take one row. Without a list of their chunks they would read the boundaries back to make it."""
    rows, length = args[0].shape[:2]

    def flat(x: Any) -> Any:
        tokens = isinstance(x, Tensor) and x.shape[:2] == (rows, length)
        return x.reshape(1, rows * length, *x.shape[2:]) if tokens else x

    boundaries, listed = packed.derived("chunks", chunks)
    out, _ = function(
        *map(flat, args),
        **{name: flat(value) for name, value in kwargs.items()},
        cu_seqlens=boundaries,
        chunk_indices=listed,  # of the gated delta rule
        use_graph=True,  # Kimi's: makes the list on the device
    )
    return out.view(rows, length, *out.shape[2:]), None


def chunks(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """The boundaries with one empty segment more, and (segment, chunk inside it) of every chunk, int32 [n, 2].

    Where only the device knows the lengths, ``n`` is an upper bound on the number of chunks. Unused entries point to
    the empty segment, where kernels neither read nor write.
    """
    boundaries = torch.cat([packed.cu_seqlens, packed.cu_seqlens[-1:]])
    counts = chunk_counts(boundaries)
    ends = counts.cumsum(0)
    if packed.lengths is None:
        n = (packed.tokens + (CHUNK - 1) * len(counts)) // CHUNK
    else:
        n = sum(-(-length // CHUNK) for length in packed.lengths)
    places = torch.arange(n, device=packed.device)
    segment = torch.bucketize(places, ends, right=True).clamp_(max=len(counts) - 1)
    inside = (places - F.pad(ends, (1, 0)).index_select(0, segment)).masked_fill_(segment == len(counts) - 1, 0)
    return boundaries, torch.stack([segment, inside], 1).int()


def chunk_counts(boundaries: Tensor) -> Tensor:
    """Chunks of each segment."""
    return (boundaries.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
