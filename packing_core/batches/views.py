"""Kernel views: one step's batch as flat int32 arrays and host integers. A batch goes in, nothing comes back.

Kernels for variable-length sequences take cumulative boundaries over *all* tokens they are handed, on the device, and
the longest segment on the host. Some leave the tokens of a segment longer than that unwritten, so padding is cut here
into segments that never are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.derived import DerivedBatch
from packing_core.errors import CapacityError
from packing_core.planning.pieces import positive
from packing_core.storage.arrays import Array, Int32
from packing_core.storage.forest import ROOT, offsets
from packing_core.storage.segment_indexing import gaps, ranges

MOST_BUCKET = 2**24


@dataclass(frozen=True, eq=False)
class KernelView:
    """T tokens of one step: R rows of ``capacity`` flattened row by row, or rows put together without padding.

    Attributes:
        input_ids: int32 [T].
        targets: int32 [T], unshifted, -100 where there is none.
        loss_weights: float32 [T].
        position_ids: int32 [T], restarting at 0 at each entry of ``cu_seqlens``, in padding too: whoever infers
            segments from restarts finds exactly these.
        seq_idx: int32 [T], the number of the segment in ``cu_seqlens``, so no number returns in the next row.
        columns: the user's per-token arrays, [T] each, as they are.
        cu_seqlens: int32 [K+1] from 0 to T: real segments and padding alike, none longer than ``max_seqlen``; past the
            last segment T is repeated up to a multiple of the bucket, so the shape stays the same from step to step.
        max_seqlen: a host integer, at least the longest segment.
        lengths: tokens of the segments in order, as host integers; the repeated tail is not in it.
        is_padding: for each of ``lengths``, whether it is padding.
        parents: for each of ``lengths``, the segment that it continues, -1 for none; None if no segment continues
            another. ``position_ids`` of a segment then count on from its parent's end.
    """

    input_ids: Int32
    targets: Int32
    loss_weights: NDArray[np.float32]
    position_ids: Int32
    seq_idx: Int32
    columns: dict[str, Array]
    cu_seqlens: Int32
    max_seqlen: int
    lengths: tuple[int, ...]
    is_padding: tuple[bool, ...]
    parents: tuple[int, ...] | None = None


def kernel_view(batch: DerivedBatch, *, max_seqlen: int | None = None, bucket: int = 1) -> KernelView:
    """The kernel view of all rows of ``batch``; take ``batch[rows]`` for some of them.

    Raises:
        CapacityError: ``max_seqlen`` is less than the longest segment, there are more tokens than int32 counts, or a
            token id or label does not fit int32.
        PackingError: ``bucket`` is less than 1.
    """
    if positive("bucket", bucket) > MOST_BUCKET:
        raise CapacityError(f"bucket is {bucket:,}: pass at most {MOST_BUCKET:,}, kernels spend time on empty entries")
    size = batch.input_ids.size
    if size > np.iinfo(np.int32).max:
        raise CapacityError(f"{size:,} tokens are more than int32 kernels count: take fewer rows, batch[first:last]")
    longest = int(batch.lengths.max()) if batch.n_segments else batch.capacity
    if max_seqlen is None:
        max_seqlen = longest
    max_seqlen = positive("max_seqlen", max_seqlen)
    if max_seqlen > np.iinfo(np.int32).max:
        raise CapacityError(f"max_seqlen is {max_seqlen:,}, which int32 kernels do not count: pass less than 2**31")
    if max_seqlen < longest:
        raise CapacityError(
            f"max_seqlen is {max_seqlen:,} and the longest segment has {longest:,} tokens: pass at least that, or None"
        )
    cuts, is_padding = _segments(batch, max_seqlen)
    lengths = np.diff(cuts)
    tail = np.full(-len(lengths) % bucket, size)
    positions, parents = ranges(lengths), None
    if batch.parents is not None:
        places = np.flatnonzero(~is_padding)
        numbers = np.full(len(lengths), ROOT)
        numbers[places] = np.where(batch.parents < 0, ROOT, places[batch.parents])
        positions, parents = positions + np.repeat(offsets(numbers, lengths), lengths), tuple(numbers.tolist())
    return KernelView(
        input_ids=as_int32(batch.input_ids.reshape(-1), "input_ids"),
        targets=as_int32(batch.targets.reshape(-1), "targets"),
        loss_weights=batch.loss_weights.reshape(-1),
        position_ids=positions.astype(np.int32),
        seq_idx=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        columns={name: array.reshape(-1) for name, array in batch.columns.items()},
        cu_seqlens=np.concatenate([cuts, tail]).astype(np.int32),
        max_seqlen=max_seqlen,
        lengths=tuple(lengths.tolist()),
        is_padding=tuple(is_padding.tolist()),
        parents=parents,
    )


def as_int32(tokens: Array, name: str) -> Int32:
    """A copy of token ids or targets as int32.

    Raises:
        CapacityError: one of them does not fit, and would become another token.
    """
    limits = np.iinfo(np.int32)
    for extreme in (tokens.max(), tokens.min()) if tokens.size and tokens.itemsize >= 4 else ():
        if not limits.min <= extreme <= limits.max:
            raise CapacityError(
                f"{name} holds {extreme:,}, which does not fit int32: kernels and other frameworks take no larger ids, "
                f"renumber them"
            )
    return tokens.astype(np.int32)


def _segments(batch: DerivedBatch, longest: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Boundaries [K+1] of segments and of padding, and which is which [K].

    Padding is cut into pieces of at most ``longest``, and at the ends of rows: a row of padding behind another row.
    """
    begin, free = gaps(batch.flat_starts, batch.lengths, batch.input_ids.size)
    row_starts = np.arange(batch.capacity, batch.input_ids.size, batch.capacity)
    gap = np.searchsorted(begin, row_starts) - 1  # the last one that begins before
    inside = row_starts < (begin + free)[gap]
    end = np.concatenate([begin + free, (begin + free)[gap[inside]]])
    begin = np.concatenate([begin, row_starts[inside]])
    free = np.minimum(end, (begin // batch.capacity + 1) * batch.capacity) - begin
    pieces = -(-free // longest)
    first = np.repeat(begin, pieces)
    starts = np.concatenate([batch.flat_starts, first + ranges(pieces) * longest])
    order = np.argsort(starts, kind="stable")
    is_padding = (np.arange(len(starts)) >= batch.n_segments)[order]
    return np.append(starts[order], batch.input_ids.size), is_padding
