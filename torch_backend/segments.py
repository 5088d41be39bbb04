"""Segment metadata of packed kernels: boundaries on the device, lengths on the host.

    lengths on the host      -> PackedMetadata.from_lengths    -> every attention and mixer layer of one forward
    boundaries on the device -> PackedMetadata.from_boundaries ->

The metadata is built once per batch, with at most one host-to-device copy, and shared by all layers; nothing here reads
back from the device. What only one implementation needs (length buckets, block masks) is derived on first use and kept
on the object by ``derived``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from packing_core.errors import LayoutError, UnsupportedError
from packing_core.storage.forest import check_parents, offsets
from torch_backend.pieces import most_pieces, pieces

Value = TypeVar("Value")
COPIED_AT_ONCE = 1 << 16  # bytes that CUDA copies from any memory without waiting
LONG = 32_768  # tokens, of whose keys and values an L2 cache holds a part


class Spans(NamedTuple):
    """The span of each token, from ``begin`` to before ``end``: its tokens see each other both ways.

    A token outside of all spans is one of its own, so in causal attention query i sees key j where ``j < end[i]``, and
    key j is seen by query i where ``i >= begin[j]``. Neither tensor ever falls, so a block's ends bound what it sees.

    Attributes:
        begin, end: int32 [T], places among the flat tokens of the batch.
    """

    begin: Tensor
    end: Tensor


class PackedMetadata:
    """The segments of ``tokens`` flat tokens; padding has segments of its own, so the segments cover every token.

    Kernels rely on that and do not clear their outputs: a token outside of all segments, or past ``max_seqlen`` in its
    own, would keep whatever its memory held. The class methods guarantee it; the constructor takes it on trust.

    Attributes:
        cu_seqlens: int32 [N+1] on the device of the batch, from 0 to ``tokens``; entries past the last segment repeat
            ``tokens`` (zero-length segments), so that N can be rounded up and shapes stay fixed.
        max_seqlen: no segment is longer; may be rounded up.
        long: whether a segment may have :data:`LONG` tokens: what graphs may ask of the longest, whatever its length.
        tokens: T, the number of flat tokens.
        lengths: the segments' lengths on the host, all positive, or None where only the device knows them.
        keys: the segments of the keys, where attention has more keys than queries: the queries of a segment are the
            last tokens of the key segment of the same number. None where the keys are the queries' own.
        parents: the segment that each one continues, -1 for none, on the host; None if no segment continues another.
            Only what says so can run such forests, so whatever reads segments asks for it or refuses. Empty where only
            ``parent_index`` knows them, or nothing any more.
        parent_index: int [N] the same on the device, for shapes that do not depend on the forest; None without.
        depth: the most segments that one continues, where there is a ``parent_index``; may be rounded up.
        spans: where tokens see each other both ways in causal attention (images, prefixes); None if none do. Only
            implementations that say so can run them.
        any_length: whether a graph that is traced with these segments is for any number of tokens, so that what reads
            them must not ask for ``tokens``, a plain int that would become a constant.

    A plain class on purpose: wrappers of modules walk through dataclasses among the arguments and rebuild them, and
    every layer would then hold a copy of its own.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tokens: int,
        lengths: tuple[int, ...] | None = None,
        parents: tuple[int, ...] | None = None,
        *,
        keys: PackedMetadata | None = None,
        parent_index: Tensor | None = None,
        depth: int = 0,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.long = max_seqlen >= LONG
        self.tokens = tokens
        self.lengths = lengths
        self.keys = keys
        self.parents = parents
        self.parent_index = parent_index
        self.depth = depth
        self.spans: Spans | None = None
        self.any_length = False
        self._plain: PackedMetadata | None = None
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        entries: int | None = None,
        max_seqlen: int | None = None,
        parents: Sequence[int] | None = None,
    ) -> PackedMetadata:
        """Metadata of consecutive segments, with one host-to-device copy.

        Args:
            lengths: tokens of each segment, positive, in the order they stand.
            device: where ``cu_seqlens`` goes.
            entries: pad ``cu_seqlens`` to this many segments (repeating its end).
            max_seqlen: rounded-up length of the longest segment.
            parents: the segment that each one continues, -1 for none; None if no segment continues another.

        Raises:
            LayoutError: no segments, a length below 1, more segments or longer ones than the roundings allow, or
                parents that make no forest.
        """
        lengths = tuple(int(n) for n in lengths)
        if not lengths or min(lengths) < 1:
            raise LayoutError(f"segment lengths must be positive and there must be one at least, got {lengths[:8]}")
        longest = max(lengths)
        if max_seqlen is not None and max_seqlen < longest:
            raise LayoutError(
                f"max_seqlen={max_seqlen:,} is shorter than the longest segment of {longest:,} tokens: raise it"
            )
        if entries is not None and entries < len(lengths):
            raise LayoutError(f"entries={entries:,} cannot hold {len(lengths):,} segments: pass that many at least")
        boundaries = torch.tensor((0, *lengths)).cumsum(0)
        tokens = sum(lengths)
        if entries is not None and entries > len(lengths):
            boundaries = torch.cat([boundaries, boundaries.new_full((entries - len(lengths),), tokens)])
        above = None if parents is None else tuple(check_parents(parents, len(lengths)).tolist())
        if above is not None and max(above) < 0:
            above = None
        return cls(to_device(boundaries.int(), device), max_seqlen or longest, tokens, lengths, above)

    @classmethod
    def of_last_tokens(
        cls, lengths: Sequence[int], key_lengths: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> PackedMetadata:
        """Metadata of queries that are the last tokens of longer key segments.

        Args:
            lengths, key_lengths: queries and keys of each segment.
            device: where the boundaries go.

        Raises:
            LayoutError: the numbers of segments differ, or a segment has fewer keys than queries.
        """
        packed, keys = (cls.from_lengths(each, device=device) for each in (lengths, key_lengths))
        assert packed.lengths is not None and keys.lengths is not None
        if len(packed.lengths) != len(keys.lengths):
            raise LayoutError(
                f"there are {len(packed.lengths)} segments of queries and {len(keys.lengths)} of keys: "
                "give each segment a length of both"
            )
        for i, (queries, seen) in enumerate(zip(packed.lengths, keys.lengths, strict=True)):
            if seen < queries:
                raise LayoutError(
                    f"segment {i} has {queries:,} queries, which are its last tokens, and {seen:,} keys: "
                    "count all of its tokens in key_lengths"
                )
        packed.keys = keys
        return packed

    def to(self, device: torch.device | str) -> PackedMetadata:
        """The same segments on another device; itself where they are on it already."""
        if torch.device(device) == self.device:
            return self
        plain = copy(self.without_spans)
        plain.cu_seqlens, plain._derived, plain.any_length = to_device(self.cu_seqlens, device), {}, False
        plain.keys = None if self.keys is None else self.keys.to(device)
        plain.parent_index = None if self.parent_index is None else to_device(self.parent_index, device)
        return plain if self.spans is None else plain._with(Spans(*(to_device(x, device) for x in self.spans)))

    def with_spans(self, numbers: Tensor) -> PackedMetadata:
        """The same segments, in which neighbours of one number see each other both ways; nothing is read back.

        Args:
            numbers: integers [T] on the device of the segments, 0 or above in a span and below outside of all. Two
                spans side by side have different numbers. A span ends where its segment does.

        >>> packed = PackedMetadata.from_lengths([4, 3]).with_spans(torch.tensor([-1, 0, 0, -1, 1, 1, -1]))
        >>> packed.spans.begin.tolist(), packed.spans.end.tolist()
        ([0, 1, 1, 3, 4, 4, 6], [1, 3, 3, 4, 6, 6, 7])
        """
        places = torch.arange(self.tokens, device=self.device, dtype=torch.int32)
        starts = numbers < 0
        starts[0] = True
        starts[1:] |= (numbers[1:] != numbers[:-1]) | (self.seq_idx[1:] != self.seq_idx[:-1])
        ends = torch.cat([starts[1:], starts[:1]])
        begin = torch.where(starts, places, 0).cummax(0).values
        end = torch.where(ends, places + 1, self.tokens).flip(0).cummin(0).values.flip(0)
        return self._with(Spans(begin, end))

    @property
    def without_spans(self) -> PackedMetadata:
        """The same segments in plain causal attention, as some layers of a model run them."""
        return self if self._plain is None else self._plain

    def _with(self, spans: Spans) -> PackedMetadata:
        spanned = copy(self)  # which shares what is derived: whatever depends on spans has them in its key
        spanned.spans, spanned._plain = spans, self
        return spanned

    @property
    def readable(self) -> bool:
        """Returns whether the lengths can be read from the device now: not while a graph is traced or captured."""
        if torch.compiler.is_compiling():
            return False
        return not (self.cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing())

    @classmethod
    def from_boundaries(
        cls,
        cu_seqlens: Tensor,
        *,
        rows: int,
        row_length: int,
        max_seqlen: int,
        device: torch.device | str,
        parent_index: Tensor | None = None,
        depth: int = 0,
    ) -> PackedMetadata:
        """Metadata from boundaries whose values only the device knows, in shapes that do not depend on the values.

        Nothing is read back, so nothing can be refused. The boundaries are read as a set of cuts instead, and whatever
        they hold, the segments cover every token once, none crosses rows, and none is longer than ``max_seqlen``:

        - cuts are clamped to [0, T], with T = ``rows * row_length``, and sorted; repeated ones count once;
        - the end of every row is a cut;
        - a segment longer than ``max_seqlen`` becomes pieces of ``max_seqlen`` and a rest. This is meant for padding,
          such as the tokens after the last boundary. A document that is longer than its batch claims is cut as well.

        Args:
            cu_seqlens: integers [N+1] on any device, the boundaries among the T flat tokens.
            rows, row_length: the shape of the batch.
            max_seqlen: the longest segment, as the batch claims it.
            device: where the metadata goes.
            parent_index: int [N], by the numbers of the segments between these boundaries, none of which is cut.
            depth: the most segments that one continues.

        Raises:
            LayoutError: ``cu_seqlens`` is not a list of integers, or one of the numbers is below 1.

        >>> packed = PackedMetadata.from_boundaries(
        ...     torch.tensor([0, 3, 6]), rows=2, row_length=5, max_seqlen=3, device="cpu"
        ... )
        >>> packed.cu_seqlens.unique().tolist()  # 5 ends the first row; 6 to 10 is padding, in pieces of 3 and 1
        [0, 3, 5, 6, 9, 10]
        """
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
            raise LayoutError(f"boundaries are integers [N+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        if min(rows, row_length, max_seqlen) < 1:
            raise LayoutError(
                f"rows, row_length and max_seqlen are at least 1, got {rows:,}, {row_length:,} and {max_seqlen:,}"
            )
        tokens, longest = rows * row_length, min(max_seqlen, row_length)
        row_ends = torch.arange(0, tokens + 1, row_length, device=device)
        cuts, _ = torch.cat([to_device(cu_seqlens, device).long().clamp(0, tokens), row_ends]).sort()
        lengths = cuts.diff()
        segment, first, exists = pieces(lengths, longest, most_pieces(tokens, lengths.shape[0], longest))
        starts = torch.where(exists, cuts[segment] + first, tokens)
        made = cls(torch.cat([starts, row_ends[-1:]]).int(), longest, tokens)
        if parent_index is not None:
            made.continue_segments(parent_index, depth)
        return made

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def seq_idx(self) -> Tensor:
        """int32 [T]: the 0-based segment of each token."""
        return self.derived("segment numbers", _seq_idx)

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]: the position of each token within its segment, or counted on from the end of its parent."""
        return self.derived("position_ids", _position_ids)

    def derived(self, key: Hashable, make: Callable[[PackedMetadata], Value]) -> Value:
        """``make(self)``, computed on first use and shared by every layer of the batch."""
        if key not in self._derived:
            self._derived[key] = make(self)
        value: Value = self._derived[key]
        return value

    def round_longest(self, row_length: int) -> None:
        """Round ``max_seqlen`` up to a power of two, or the length of a row, so that it takes few values."""
        self.max_seqlen = min(1 << (self.max_seqlen - 1).bit_length(), row_length)
        if self._plain is not None:
            self._plain.round_longest(row_length)

    def continue_segments(self, parent_index: Tensor, depth: int) -> None:
        """Say on the device which segment each one continues, -1 for none; entries that are missing continue none."""
        more = self.cu_seqlens.shape[0] - 1 - parent_index.shape[0]
        index = to_device(parent_index, self.device).int()
        self.parent_index, self.depth = torch.nn.functional.pad(index, (0, more), value=-1), depth
        self.parents = () if self.parents is None else self.parents

    def mark_any_length(self) -> None:
        """Tell torch.compile, before it traces what reads the segments, that their number and that of tokens vary."""
        for x in () if self.any_length else (self.cu_seqlens, *self._derived.values()):
            for each in x if isinstance(x, tuple) else (x,):
                if isinstance(each, Tensor) and each.ndim:
                    torch._dynamo.maybe_mark_dynamic(each, 0)
        self.any_length = True

    def check_covers(self, name: str, tokens: int) -> None:
        """Checks that the segments are those of a tensor of so many tokens; a graph for any number takes it on trust.

        Raises:
            LayoutError: they cover more tokens or fewer.
        """
        if self.any_length and torch.compiler.is_compiling():
            return
        if self.tokens != tokens:
            raise LayoutError(
                f"the segments cover {self.tokens:,} tokens and {name} holds {tokens:,}: "
                "pass the segments of the batch that it comes from"
            )

    def forget(self) -> None:
        """Drop what was derived."""
        self._derived.clear()

    def hide_values(self) -> None:
        """Drop what only this batch has on the host, since a compiled graph would contain it as constants.

        Segments still say that they continue others, though not which: what needs that was derived before.
        """
        self.lengths = None
        self.parents = None if self.parents is None else ()
        if self._plain is not None:
            self._plain.hide_values()


def refuse_parents(packed: PackedMetadata, what: str) -> None:
    """Raise if segments continue others: ``what`` would begin each of them anew.

    Raises:
        UnsupportedError
    """
    if packed.parents is not None:
        raise UnsupportedError(f"{what} cannot run shared prefixes: pack without them (share_prefix=False)")


def refined(packed: PackedMetadata, chunk: int) -> PackedMetadata:
    """The same tokens with every segment cut into pieces of ``chunk``, for attention that sees its own chunk only.

    Raises:
        UnsupportedError: see :func:`host_lengths`.
    """
    refuse_parents(packed, "attention that sees its own chunk only")
    if packed.spans is not None:
        raise UnsupportedError("attention that sees its own chunk only cannot run tokens that see each other both ways")
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
    """``host`` on ``device`` without waiting for the device: a blocking copy would be a synchronisation.

    CUDA copies from memory that is not pinned when the device has done what came before, unless it is little.
    """
    device = torch.device(device)
    if device.type == "cuda" and host.device.type == "cpu" and host.nbytes > COPIED_AT_ONCE and not host.is_pinned():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _seq_idx(packed: PackedMetadata) -> Tensor:
    places = torch.arange(packed.tokens, device=packed.device, dtype=torch.int32)
    return torch.bucketize(places, packed.cu_seqlens[1:], out_int32=True, right=True)


def _position_ids(packed: PackedMetadata) -> Tensor:
    starts = packed.cu_seqlens.index_select(0, packed.seq_idx)
    positions = torch.arange(packed.tokens, device=packed.device) - starts
    if packed.parents is None:
        return positions
    if packed.parent_index is not None:
        return positions + ancestors(packed)[1].index_select(0, packed.seq_idx)
    before = offsets(np.array(packed.parents), np.array(host_lengths(packed)))
    return positions + to_device(torch.from_numpy(before), packed.device).index_select(0, packed.seq_idx)


def ancestors(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """The segments above each one, by what the device knows, in shapes that depend on ``packed.depth`` alone.

    Returns:
        int64 [N, depth + 1] the segment itself, its parent and so on, -1 for none; int64 [N] the tokens of them all but
        itself, the position of its first token.
    """
    return packed.derived("ancestors", _ancestors)


def _ancestors(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    assert packed.parent_index is not None
    parents = packed.parent_index.long()
    table = [torch.arange(len(parents), device=packed.device)]
    for _ in range(packed.depth):
        table.append(torch.where(table[-1] >= 0, parents[table[-1].clamp(min=0)], -1))
    found, lengths = torch.stack(table, 1), packed.cu_seqlens.diff().long()
    return found, torch.where(found >= 0, lengths[found.clamp(min=0)], 0).sum(1) - lengths
