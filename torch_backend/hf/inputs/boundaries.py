"""The segments of a batch: from the metadata keys that a collator emits to one :class:`PackedMetadata`, checked.

The keys of :class:`BatchKey` -> :func:`take_metadata` -> PackedMetadata. Whatever the host knows is checked at once,
and the messages say which segment is wrong. What only the device knows goes through a Guard.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from packing_core.storage.forest import check_parents
from torch_backend.hf.inputs.guard import Guard, has_values, on_host
from torch_backend.packed_tokens import PackedTokens, holds_several, plain
from torch_backend.pieces import padding_lengths
from torch_backend.segments import PackedMetadata, to_device

LOOKED_AT = 8  # batches of a model that are looked at where each batch would cost time
PAGED_CACHE = "cache"  # of transformers' continuous batching
WAY_OUT = (
    "let PackedCollator build the batches, or wrap the present collator, crosspack.with_boundaries(collator), "
    "which marks the boundaries that it hints at"
)

SPLIT_ROWS = "cannot be combined with packing, which needs whole documents: use FSDP or tensor parallelism"


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Returns whether a batch carries segments. The boundaries of continuous batching belong to its paged cache."""
    carries = any(batch.get(key) is not None for key in (BatchKey.LENGTHS, BatchKey.BOUNDARIES))
    return carries and batch.get(PAGED_CACHE) is None


def take_tokens(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with plain tensors for :class:`PackedTokens`.

    Raises:
        LayoutError: tokens of several documents in a row came without their boundaries.
    """
    if not is_packed(kwargs):
        for name, value in kwargs.items():
            if isinstance(value, PackedTokens) and holds_several(value):
                raise LayoutError(
                    f"{name} came packed from a collator, and its boundaries were left out, so that its documents "
                    "would run as one: hand on the whole batch, model(**batch). Where the whole row is meant to be one "
                    f"document, pass {name}.as_subclass(torch.Tensor)"
                )
    return plain(kwargs)


def take_metadata(
    batch: MutableMapping[str, Any], *, tokens: Tensor, host_lengths: bool, guard: Guard
) -> PackedMetadata:
    """Remove the metadata keys from ``batch``, which :func:`is_packed`, and return what they say.

    Lengths on the host decide, also where boundaries on the device contradict them; the guard reports that.

    Args:
        batch: keyword arguments of a model.
        tokens: ``input_ids`` [B, S] or ``inputs_embeds`` [B, S, D].
        host_lengths: whether the implementation needs lengths on the host. If ``packed_lengths`` is not in the batch
            they are read from ``cu_seq_lens_q``, which waits for the device if it lies there.
        guard: see :meth:`Guard.check`.

    Raises:
        LayoutError: the keys contradict each other or the shape.
    """
    values = {key: batch.pop(key, None) for key in BatchKey.ALL}
    found = {key: value for key, value in values.items() if value is not None}
    _check_forms(found)
    (rows, row_length), device, embedded = tokens.shape[:2], tokens.device, tokens.ndim == 3
    boundaries: Tensor | None = found.get(BatchKey.BOUNDARIES)
    lengths: Sequence[int] | None = found.get(BatchKey.LENGTHS)
    parents = _parents(found, row_length)
    longest: Any = found.get(BatchKey.LONGEST)
    if boundaries is not None and lengths is None and not embedded and batch.get("labels") is None:
        _check_tail(tokens, boundaries, guard)
    if boundaries is not None and torch.compiler.is_compiling() and not host_lengths:
        lengths = None  # values on the host would be compiled in, one graph per batch
    elif (
        boundaries is not None and lengths is None and (host_lengths or longest is None or guard.immediate(boundaries))
    ):
        lengths = _lengths_between(boundaries.tolist(), rows, row_length, tail=not embedded)
        boundaries = None
    if lengths is None:
        assert boundaries is not None
        claimed = PackedMetadata(to_device(boundaries.int(), device), int(longest), rows * row_length)
        if torch.compiler.is_compiling():
            return claimed
        _check_on_device(claimed, guard, rows=rows)
        # also while a CUDA graph is recorded, or compiled layers would meet new shapes in it and be compiled again
        return PackedMetadata.from_boundaries(
            claimed.cu_seqlens,
            rows=rows,
            row_length=row_length,
            max_seqlen=int(longest),
            device=device,
            parent_index=found.get(BatchKey.PARENT_INDEX),
            depth=found.get(BatchKey.DEPTH, 0),
        )
    lengths = check_lengths(lengths, rows=rows, row_length=row_length, embedded=embedded)
    longest = _check_agreement(found, lengths, guard, row_length=row_length)
    if boundaries is None:
        return _continued(
            PackedMetadata.from_lengths(lengths, device=device, max_seqlen=longest, parents=parents), found
        )
    if not has_values(boundaries):
        return PackedMetadata(to_device(boundaries.int(), device), longest, rows * row_length, lengths, parents)
    entries = len(boundaries) - 1  # as many as the batch has, so that shapes stay fixed
    packed = PackedMetadata.from_lengths(lengths, device=device, entries=entries, max_seqlen=longest, parents=parents)
    packed = _continued(packed, found)
    if not guard.immediate(boundaries):
        _check_contradiction(packed, boundaries, guard)
    return packed


def _continued(packed: PackedMetadata, found: Mapping[str, Any]) -> PackedMetadata:
    """The segments, which continue others also by what the device knows, if the batch says so there."""
    if (index := found.get(BatchKey.PARENT_INDEX)) is not None:
        packed.continue_segments(index, found[BatchKey.DEPTH])
    return packed


def _parents(found: Mapping[str, Any], row_length: int) -> tuple[int, ...] | None:
    """The parents of the segments; None if no segment continues another.

    Raises:
        LayoutError: they make no forest, a tree crosses rows, or the lengths are not on the host.
    """
    given, lengths = found.get(BatchKey.PARENTS), found.get(BatchKey.LENGTHS)
    if given is None:
        return None
    if lengths is None:
        raise LayoutError("packed_parents needs packed_lengths beside it, the segments' lengths on the host")
    parents = check_parents(given, len(lengths))
    row = (np.cumsum(lengths) - lengths) // row_length
    children = np.flatnonzero(parents >= 0)
    apart = children[row[children] != row[parents[children]]]
    if len(apart):
        s = int(apart[0])
        raise LayoutError(
            f"segment {s} stands in row {row[s]} and its parent {parents[s]} in row {row[parents[s]]}: a tree stands "
            "in one row, so repeat the parent's tokens there"
        )
    return tuple(parents.tolist()) if len(children) else None


def refuse_split_rows(parallelism: Any, *, kinds: Sequence[str] = ("context", "sequence")) -> None:
    """Raise for context or sequence parallelism, which gives every rank a part of each row.

    Args:
        parallelism: an ``accelerate.ParallelismConfig``, or None.
        kinds: which of them are refused; where "context" is not, the error names it as the way out.

    Raises:
        UnsupportedError
    """
    for kind in kinds:
        short = f"{kind[0]}p"
        if getattr(parallelism, f"{short}_enabled", False):
            size = getattr(parallelism, f"{short}_size")
            way_out = "" if "context" in kinds else f", or context parallelism, cp_size={size}"
            raise UnsupportedError(f"{kind} parallelism ({short}_size={size}) {SPLIT_ROWS}{way_out}")


def _check_forms(marks: Mapping[str, Any]) -> None:
    """Types, shapes and dtypes of the metadata keys; reads no values."""
    for key in BatchKey.CUMULATIVE:
        value = marks.get(key)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.ndim != 1 or len(value) < 2 or value.is_floating_point():
            form = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            cut = isinstance(value, Tensor) and value.shape == (1,)
            why = ": accelerate cut it with the rows, pass dispatch_batches=False to it" if cut else ""
            raise LayoutError(f"{key} must be an integer tensor [N+1] for N segments, got {form}{why}")
    lengths, boundaries = marks.get(BatchKey.LENGTHS), marks.get(BatchKey.BOUNDARIES)
    if lengths is None:
        return
    if isinstance(lengths, Tensor | str) or not isinstance(lengths, Sequence):
        raise LayoutError(f"packed_lengths must be a tuple of ints on the host, got a {type(lengths).__name__}")
    if boundaries is not None and len(lengths) > len(boundaries) - 1:
        raise LayoutError(
            f"packed_lengths has {len(lengths)} segments and cu_seq_lens_q {len(boundaries) - 1}: "
            "padding must be segments of its own in both, as PackedCollator gives it"
        )


def _lengths_between(marks: Sequence[int], rows: int, row_length: int, *, tail: bool) -> list[int]:
    """Lengths of the segments between boundaries [N+1]; equal neighbours are empty segments and are left out.

    With ``tail``, tokens after the last boundary are padding, which becomes segments of its own.
    """
    if marks[0] != 0:
        raise LayoutError(f"cu_seq_lens_q must start at 0, got {marks[0]:,}")
    for i, (start, end) in enumerate(pairwise(marks)):
        if end < start:
            raise LayoutError(f"cu_seq_lens_q must not decrease: entry {i + 1} is {end:,} after {start:,}")
    lengths = [end - start for start, end in pairwise(marks) if end != start]
    if not tail:
        return lengths
    return lengths + padding_lengths(marks[-1], rows * row_length, row_length, max(lengths, default=1))


def check_lengths(lengths: Sequence[Any], *, rows: int, row_length: int, embedded: bool = False) -> tuple[int, ...]:
    """The lengths as ints: positive, together as long as the batch, and none across rows.

    Args:
        lengths: tokens of each segment, in the order they stand.
        rows, row_length: the shape of the batch.
        embedded: whether the batch came as ``inputs_embeds``.

    Raises:
        LayoutError: what is wrong and at which segment.
    """
    try:
        lengths = tuple(operator.index(length) for length in lengths)
    except TypeError as error:
        raise LayoutError(f"packed_lengths must be a tuple of ints, got {lengths!s:.80}") from error
    if not lengths or min(lengths) < 1:
        where = f"segment {lengths.index(min(lengths))} has {min(lengths):,} tokens" if lengths else "there is none"
        raise LayoutError(f"segment lengths must be positive and there must be one at least: {where}")
    ends, tokens = list(accumulate(lengths)), rows * row_length
    if ends[-1] != tokens:
        name = "inputs_embeds" if embedded else "input_ids"
        raise LayoutError(
            f"the segments hold {ends[-1]:,} tokens and {name} {tokens:,}: {_why(ends[-1], tokens, embedded)}"
        )
    for i, (start, end) in enumerate(pairwise([0, *ends])):
        if (end - 1) // row_length != start // row_length:
            raise LayoutError(
                f"a segment crosses from one row of {row_length:,} tokens into the next: segment {i} holds tokens "
                f"{start:,} to {end - 1:,} of the batch"
            )
    return lengths


def _why(held: int, tokens: int, embedded: bool) -> str:
    """The likely reason for segments that do not fit the batch, and the way out."""
    if embedded and held < tokens:
        return (
            "if prompt tuning (PEFT's virtual tokens) added the others, it cannot be packed, because every document "
            "would need the prompt; use LoRA. Otherwise mark every token, padding too"
        )
    if held > tokens and held % tokens == 0:
        return f"if context or sequence parallelism cut the rows into {held // tokens} parts, it {SPLIT_ROWS}"
    return "padding belongs to segments of its own, as PackedCollator gives it"


def _check_agreement(found: Mapping[str, Any], lengths: tuple[int, ...], guard: Guard, *, row_length: int) -> int:
    """Check the other keys, as far as their values are on the host, against ``lengths``.

    Returns how long a segment may be: ``max_length_q``, or the longest one.
    """
    ends = [0, *accumulate(lengths)]
    known = {key: x for key, x in found.items() if not isinstance(x, Tensor) or guard.immediate(x)}
    marks = {key: known[key].tolist() for key in BatchKey.CUMULATIVE if key in known}
    if len(marks) == 2 and marks[BatchKey.BOUNDARIES] != marks[BatchKey.KEY_BOUNDARIES]:
        where = _difference(*marks.values())
        raise LayoutError(
            f"cu_seq_lens_q and cu_seq_lens_k differ {where}: in self-attention they are the same, "
            "so leave the second one out"
        )
    for key, given in marks.items():
        filled = [end for i, end in enumerate(given) if i == 0 or end != given[i - 1]]
        if BatchKey.LENGTHS in known and filled != ends:
            raise LayoutError(f"packed_lengths and {key} disagree {_difference(ends, filled)}: {WAY_OUT}")
    if BatchKey.NUMBERS in known and marks.get(BatchKey.BOUNDARIES, ends)[-1] == ends[-1]:
        _check_numbers(known[BatchKey.NUMBERS], ends, row_length=row_length)
    longest = max(lengths)
    for name in BatchKey.LONGEST_OF_BOTH:
        if int(known.get(name, longest)) < longest:
            raise LayoutError(
                f"{name} is {int(known[name]):,} and segment {lengths.index(longest)} has {longest:,} tokens: "
                "pass that many at least"
            )
    return int(known.get(BatchKey.LONGEST, longest))


def _check_numbers(seq_idx: Tensor, ends: Sequence[int], *, row_length: int) -> None:
    """The number of a token's segment, [B, S], must change where segments end and nowhere else inside a row."""
    if seq_idx.numel() != ends[-1]:
        raise LayoutError(f"seq_idx must number the {ends[-1]:,} tokens of the batch, got {list(seq_idx.shape)}")
    rows, columns = seq_idx.reshape(-1, row_length).diff().nonzero(as_tuple=True)
    changes = (rows * row_length + columns + 1).tolist()
    inside = [end for end in ends[1:-1] if end % row_length]
    if changes != inside:
        raise LayoutError(f"seq_idx contradicts the boundaries {_difference(inside, changes)}: {WAY_OUT}")


def _difference(one: Sequence[int], other: Sequence[int]) -> str:
    """Describes the first difference of two lists of boundaries."""
    pairs = enumerate(zip(one, other, strict=False))
    i = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    values = (f"{marks[i]:,}" if i < len(marks) else "nothing" for marks in (one, other))
    return f"at boundary {i} ({' and '.join(values)})"


def _check_on_device(packed: PackedMetadata, guard: Guard, *, rows: int) -> None:
    """From 0 up to the last token at most, across no row, no segment too long; the rest is padding."""
    row_length = packed.tokens // rows
    marks, longest = packed.cu_seqlens, packed.max_seqlen

    def find() -> Tensor:
        starts, ends = marks[:-1], marks[1:]
        crosses = (ends > starts) & ((ends - 1) // row_length != starts // row_length)
        outside = torch.stack((marks[0] != 0, marks[-1] > packed.tokens))
        return torch.cat((crosses | (ends < starts) | (ends - starts > longest), outside))

    def error(i: int) -> PackingError:
        where = f"at segment {i}" if i < len(marks) - 1 else "at its first or last entry"
        return LayoutError(
            f"cu_seq_lens_q is wrong {where}: it must go from 0 to at most {packed.tokens:,}, the tokens of the batch, "
            f"without decreasing, cross no row of {row_length:,} tokens, and hold no segment longer than "
            f"{longest:,} (max_length_q)"
        )

    guard.check(BatchKey.BOUNDARIES, find, error)


def _check_tail(ids: Tensor, boundaries: Tensor, guard: Guard) -> None:
    """Raise where tokens [B, S] after the last boundary are no padding, which repeats one token.

    On a device the first batches of a model are looked at.
    """
    if not (guard.immediate(boundaries) or guard.begins("tail", LOOKED_AT)):
        return

    def find() -> Tensor:
        flat = ids.flatten()
        after = torch.arange(len(flat), device=flat.device) >= to_device(boundaries[-1:], flat.device)
        return after & (flat != flat[-1])

    def error(i: int) -> PackingError:
        row, token = divmod(i, ids.shape[1])
        return LayoutError(
            f"cu_seq_lens_q ends before the last token, and the tokens after it differ (row {row}, token {token}), as "
            f"those of documents do and padding does not: {WAY_OUT}"
        )

    guard.check("tokens after the last boundary", find, error)


def check_no_restart(positions: Tensor, packed: PackedMetadata, guard: Guard) -> None:
    """Raise for positions [B, S] that fall back inside a segment to its first one or to 0: another document begins.

    Raises:
        LayoutError: the boundaries leave out one that the positions show.
    """

    def find() -> Tensor:
        flat, starts = to_device(positions, packed.device).flatten(), packed.cu_seqlens[:-1]
        begins = torch.zeros(len(flat) + 1, dtype=torch.bool, device=flat.device).index_fill_(0, starts.long(), True)
        before, here = flat[:-1], flat[1:]
        falls = (here < before) & ~begins[1:-1]
        if on_host(falls) and not falls.any():
            return falls  # as in nearly all batches; what follows numbers the document of every token
        first = flat.index_select(0, starts.clamp(max=len(flat) - 1)).index_select(0, packed.seq_idx)
        return falls & ((here == 0) | (here == first[1:]))

    def error(i: int) -> PackingError:
        row, token = divmod(i + 1, positions.shape[1])
        return LayoutError(
            f"position_ids begin again at row {row}, token {token}, inside a segment of cu_seq_lens_q: the boundaries "
            "leave out one that the positions show. Mark it, or number the document through"
        )

    guard.check("position_ids inside segments", find, error)


def _check_contradiction(packed: PackedMetadata, boundaries: Tensor, guard: Guard) -> None:
    """The boundaries of the batch, which lie on the device, against those that its lengths gave."""

    def error(i: int) -> PackingError:
        return LayoutError(f"packed_lengths and cu_seq_lens_q disagree at boundary {i}: {WAY_OUT}")

    guard.check(BatchKey.LENGTHS, lambda: to_device(boundaries, packed.device) != packed.cu_seqlens, error)
