"""Running a batched operation on documents of similar length: flat tokens -> padded batches -> flat tokens.

Whatever has no packed kernel (scaled dot product attention, a recurrence in plain torch) runs on ``[n, L, ...]``
batches in which every row is one document padded at its end, so a causal operation needs no segment mask. The padded
length of a document follows from its own length alone, and its padding repeats its own last token: nothing of another
document, not even a NaN, enters its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_backend.segments import PackedMetadata, host_lengths, refuse_parents, to_device


@dataclass(frozen=True, eq=False)
class Buckets:
    """The documents of a batch in padded batches, laid end to end as P places.

    Attributes:
        shapes: (n, L) of each batch; P is the sum of n * L.
        gather: int64 [P] the flat token at each place; places past a document's end repeat its last token.
        scatter: int64 [T] the place of each flat token.
        real: bool [P] which places hold a token.
    """

    shapes: tuple[tuple[int, int], ...]
    gather: Tensor
    scatter: Tensor
    real: Tensor


# Padded lengths per octave: none, so that only documents of one length share a batch; little padding; few batches, for
# what launches so many small operations on each that their number counts more than their size.
OWN, FINE, COARSE = 0, 8, 2


def padded_lengths(lengths: NDArray[np.int64], sizes: int = FINE) -> NDArray[np.int64]:
    """Each length rounded up to one of ``sizes`` per octave, so that less than one part in ``sizes`` is padding.

    Lengths up to 64 are rounded like those just above.
    """
    if sizes == OWN:
        return lengths
    octave = np.ceil(np.log2(lengths)).astype(np.int64)
    step = (1 << np.maximum(octave - 1, 6)) // sizes
    rounded: NDArray[np.int64] = -(-lengths // step) * step
    return rounded


def buckets(packed: PackedMetadata, *, sizes: int = FINE) -> Buckets:
    """The batch's documents by padded length, built on first use and shared by every layer.

    Raises:
        UnsupportedError: the lengths are not known on the host.
    """
    refuse_parents(packed, "what runs on batches of documents")
    return packed.derived(("buckets", sizes), lambda _: _build(packed, sizes))


def map_documents(
    packed: PackedMetadata, function: Callable[..., Tensor], *tensors: Tensor, sizes: int = FINE
) -> Tensor:
    """``function`` applied to padded batches of whole documents.

    Args:
        packed: the segments.
        function: takes ``[n, L, ...]`` per tensor and returns ``[n, L, ...]``; what it returns at a place may depend
            on that place and earlier ones of the same row only, or on the whole row if ``sizes`` is ``OWN``.
        tensors: ``[T, ...]`` each.
        sizes: padded lengths per octave, see :func:`padded_lengths`.

    Returns:
        [T, ...].
    """
    batches = zip(*(to_batches(packed, x, sizes=sizes) for x in tensors), strict=True)
    return from_batches(packed, [function(*rows) for rows in batches], sizes=sizes)


def to_batches(packed: PackedMetadata, x: Tensor, *, sizes: int = FINE) -> list[Tensor]:
    """[T, ...] -> one [n, L, ...] per padded length."""
    laid = buckets(packed, sizes=sizes)
    batches = torch.split(_pad(x, laid), [n * length for n, length in laid.shapes])
    return [rows.view(*shape, *x.shape[1:]) for rows, shape in zip(batches, laid.shapes, strict=True)]


def from_batches(packed: PackedMetadata, batches: Sequence[Tensor], *, sizes: int = FINE) -> Tensor:
    """The inverse of :func:`to_batches`: what stands at padding is left out."""
    return _unpad(torch.cat([rows.flatten(0, 1) for rows in batches]), buckets(packed, sizes=sizes))


@dataclass(frozen=True)
class PerBatch:
    """An argument of :func:`per_document` that is made for every batch of documents [n, L, ...], such as a mask."""

    make: Callable[[Tensor], Any]


class RealTokens:
    """An argument of :func:`per_document` that is a mask of every batch of documents, [n, L], 1 at real tokens."""


def per_document(
    packed: PackedMetadata,
    layer: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    sizes: int = FINE,
) -> Any:
    """``layer(*args, **kwargs)`` as if every document were in a batch of its own.

    Args:
        packed: the segments of [B, S] tokens.
        layer: causal along its second axis.
        args, kwargs: its arguments; every tensor [B, S, ...] among them, in tuples too, is split into documents, and
            every :class:`PerBatch` is replaced by what it makes, and every :class:`RealTokens` by the batch's mask.
        sizes: padded lengths per octave, see :func:`padded_lengths`.

    Returns:
        What the layer returns, every tensor [B, S, ...] put together again and tensors of other shapes (states) None.
    """
    values = [*args, *kwargs.values()]
    first = next(x for x in values if isinstance(x, Tensor))
    rows, length = first.shape[:2]
    batches = to_batches(packed, first.flatten(0, 1), sizes=sizes)

    split = partial(_split, packed, batches, (rows, length), sizes)
    results = []
    for call in zip(*map(split, values), strict=True):
        named = dict(zip(kwargs, call[len(args) :], strict=True))
        results.append(layer(*call[: len(args)], **named))
    return _join(packed, batches, (rows, length), sizes, tuple(results))


# Not inside of per_document: a function that calls itself refers to itself there, and would hold the batches.
def _split(packed: PackedMetadata, batches: list[Tensor], shape: tuple[int, int], sizes: int, value: Any) -> list[Any]:
    """Split an argument into one for each of the batches."""
    if isinstance(value, PerBatch):
        return [value.make(batch) for batch in batches]
    if isinstance(value, RealTokens):
        laid = buckets(packed, sizes=sizes)
        parts = laid.real.long().split([n * length for n, length in laid.shapes])
        return [part.view(of_batch) for part, of_batch in zip(parts, laid.shapes, strict=True)]
    if isinstance(value, Tensor) and value.shape[:2] == shape:
        return to_batches(packed, value.flatten(0, 1), sizes=sizes)
    if isinstance(value, tuple):
        return list(zip(*(_split(packed, batches, shape, sizes, x) for x in value), strict=True))
    return [value] * len(batches)


def _join(
    packed: PackedMetadata, batches: list[Tensor], shape: tuple[int, int], sizes: int, parts: tuple[Any, ...]
) -> Any:
    """Join what the layer returned of the batches."""
    join = partial(_join, packed, batches, shape, sizes)
    if isinstance(parts[0], tuple):
        return tuple(join(part) for part in zip(*parts, strict=True))
    if hasattr(parts[0], "to_tuple"):  # a ModelOutput of transformers
        return type(parts[0])(**{name: join(tuple(part[name] for part in parts)) for name in parts[0]})
    if all(isinstance(p, Tensor) and p.shape[:2] == b.shape[:2] for p, b in zip(parts, batches, strict=True)):
        return from_batches(packed, parts, sizes=sizes).reshape(*shape, *parts[0].shape[2:])
    return None


class _Pad(torch.autograd.Function):
    """[T, ...] -> [P, ...]. A gather both ways: what flows back to padding is zero, so it is left out, not added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, laid: Buckets) -> Tensor:
        ctx.laid = laid
        return x.index_select(0, laid.gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.laid.scatter), None


class _Unpad(torch.autograd.Function):
    """[P, ...] -> [T, ...], the gradient at padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, laid: Buckets) -> Tensor:
        ctx.laid = laid
        return x.index_select(0, laid.scatter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        real = ctx.laid.real.view(-1, *[1] * (grad.ndim - 1))
        return grad.index_select(0, ctx.laid.gather).masked_fill(~real, 0), None


# Named here because torch leaves Function.apply untyped.
_pad: Callable[[Tensor, Buckets], Tensor] = _Pad.apply
_unpad: Callable[[Tensor, Buckets], Tensor] = _Unpad.apply


def _build(packed: PackedMetadata, sizes: int) -> Buckets:
    lengths = np.asarray(host_lengths(packed), np.int64)
    starts = np.cumsum(lengths) - lengths
    padded = padded_lengths(lengths, sizes)
    order = np.argsort(padded, kind="stable")
    widths, counts = np.unique(padded, return_counts=True)
    # Place p belongs to the document `owner[p]`, at `offset[p]` of its row.
    owner = np.repeat(order, padded[order])
    row_starts = np.cumsum(padded[order]) - padded[order]
    offset = np.arange(len(owner)) - np.repeat(row_starts, padded[order])
    real = offset < lengths[owner]
    gather = starts[owner] + np.minimum(offset, lengths[owner] - 1)
    scatter = np.empty(packed.tokens, np.int64)
    scatter[gather[real]] = np.flatnonzero(real)
    table = to_device(torch.from_numpy(np.concatenate([gather, real, scatter])), packed.device)
    gather_, real_, scatter_ = torch.split(table, [len(gather), len(gather), packed.tokens])
    return Buckets(
        tuple((int(n), int(size)) for n, size in zip(counts, widths, strict=True)), gather_, scatter_, real_.bool()
    )
