"""What packed kernels read of a batch: boundaries on the device, lengths on the host.

Lengths (host) -> :class:`PackedMetadata` -> every attention and mixer layer of one forward. It is built once per batch
with one host-to-device copy and shared by all layers; nothing here ever reads back from the device. What only one
implementation needs (length buckets, block masks) is derived on first use and kept on the object by ``derived``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError

Value = TypeVar("Value")


class PackedMetadata:
    """The segments of ``tokens`` flat tokens; padding has segments of its own, so the segments cover every token.

    Attributes:
        cu_seqlens: int32 [N+1] on the device of the batch, from 0 to ``tokens``; entries past the last segment repeat
            ``tokens`` (zero-length segments), so that N can be rounded up and shapes stay fixed.
        max_seqlen: no segment is longer; may be rounded up.
        tokens: T, the number of flat tokens.
        lengths: the segments' lengths on the host, all positive, or None where only the device knows them.

    A plain class on purpose: wrappers of modules walk through dataclasses among the arguments and rebuild them, and
    every layer would then hold a copy of its own.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, tokens: int, lengths: tuple[int, ...] | None = None
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.tokens = tokens
        self.lengths = lengths
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        entries: int | None = None,
        max_seqlen: int | None = None,
    ) -> PackedMetadata:
        """Metadata of consecutive segments, with one host-to-device copy.

        Args:
            lengths: tokens of each segment, positive, in the order they stand.
            device: where ``cu_seqlens`` goes.
            entries: pad ``cu_seqlens`` to this many segments (repeating its end).
            max_seqlen: rounded-up length of the longest segment.

        Raises:
            LayoutError: no segments, a length below 1, or more segments or longer ones than the roundings allow.
        """
        lengths = tuple(int(n) for n in lengths)
        if not lengths or min(lengths) < 1:
            raise LayoutError(f"segment lengths must be positive and there must be one at least, got {lengths[:8]}")
        longest = max(lengths)
        if max_seqlen is not None and max_seqlen < longest:
            raise LayoutError(f"max_seqlen={max_seqlen:,} is shorter than the longest segment of {longest:,} tokens")
        if entries is not None and entries < len(lengths):
            raise LayoutError(f"entries={entries:,} cannot hold {len(lengths):,} segments")
        boundaries = torch.tensor((0, *lengths)).cumsum(0)
        tokens = sum(lengths)
        if entries is not None and entries > len(lengths):
            boundaries = torch.cat([boundaries, boundaries.new_full((entries - len(lengths),), tokens)])
        return cls(to_device(boundaries.int(), device), max_seqlen or longest, tokens, lengths)

    def to(self, device: torch.device | str) -> PackedMetadata:
        """The same segments on another device; itself where they are on it already."""
        if torch.device(device) == self.device:
            return self
        return PackedMetadata(to_device(self.cu_seqlens, device), self.max_seqlen, self.tokens, self.lengths)

    @property
    def readable(self) -> bool:
        """Whether the lengths could be read from the device now: not while a graph is traced or captured."""
        if torch.compiler.is_compiling():
            return False
        return not (self.cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing())

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def seq_idx(self) -> Tensor:
        """int32 [T]: the 0-based segment of each token."""
        return self.derived("seq_idx", _seq_idx)

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]: the position of each token within its segment."""
        return self.derived("position_ids", _position_ids)

    def derived(self, key: Hashable, make: Callable[[PackedMetadata], Value]) -> Value:
        """``make(self)``, computed on first use and shared by every layer of the batch."""
        if key not in self._derived:
            self._derived[key] = make(self)
        value: Value = self._derived[key]
        return value


def refined(packed: PackedMetadata, chunk: int) -> PackedMetadata:
    """The same tokens with every segment cut into pieces of ``chunk``, for attention that sees its own chunk only.

    Raises:
        UnsupportedError: see :func:`host_lengths`.
    """
    lengths = host_lengths(packed)

    def cut(_: PackedMetadata) -> PackedMetadata:
        pieces = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
        return PackedMetadata.from_lengths(pieces, device=packed.device)

    return packed.derived(("refined", chunk), cut)


def host_lengths(packed: PackedMetadata) -> tuple[int, ...]:
    """The segments' lengths on the host; read from the device, once per batch, where only it knows them.

    Raises:
        UnsupportedError: only the device knows them, and a graph is being traced or captured.
    """
    if packed.lengths is None:
        if not packed.readable:
            raise UnsupportedError(
                "the segment lengths are needed on the host while a graph is traced or captured: let PackedCollator "
                "build the batch, or wrap its collator in with_boundaries"
            )
        boundaries = packed.cu_seqlens.tolist()
        packed.lengths = tuple(end - start for start, end in pairwise(boundaries) if end != start)
    return packed.lengths


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """``host`` on ``device`` without waiting for the device: a blocking copy would be a synchronisation."""
    return host.to(device, non_blocking=True)


def _seq_idx(packed: PackedMetadata) -> Tensor:
    places = torch.arange(packed.tokens, device=packed.device, dtype=torch.int32)
    return torch.bucketize(places, packed.cu_seqlens[1:], out_int32=True, right=True)


def _position_ids(packed: PackedMetadata) -> Tensor:
    starts = packed.cu_seqlens.index_select(0, packed.seq_idx)
    return torch.arange(packed.tokens, device=packed.device) - starts
