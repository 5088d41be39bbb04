"""``pack_tree``: documents with common beginnings in, rows in which each beginning stands once out.

    documents -> one long row (:func:`.dataset.pack`, which checks them) -> trees of pieces, by content
              -> whole trees into rows (:func:`packing_core.plan`) -> a PackedBatch with ``parents``

What may be shared are the first tokens of a document up to its first target: the loss of a target belongs to one
document. So every document keeps a piece of its own, the leaf of its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import pack
from packing_core.batches.stored import IGNORE_INDEX, Weighting, segment_starts
from packing_core.errors import CapacityError, LayoutError, PackingError
from packing_core.hints import hinted
from packing_core.planning.cost import Cost
from packing_core.planning.pieces import positive
from packing_core.planning.plan import plan
from packing_core.storage.arrays import Array, Int64, as_array, as_int64
from packing_core.storage.forest import ROOT, offsets
from packing_core.storage.ragged import Ragged
from packing_core.storage.segment_indexing import gaps, indexes, offsets_of

SHORTEST = 16
# What "auto" shares: beginnings of so many tokens, in batches that save such a part of their work by it.
LONG, LEAST_SAVED = 64, 0.1
_REFUSED = {"overflow": 'pass overflow="error" or "repeat"', "max_segments": "it counts documents, not trees"}


@dataclass(eq=False)
class _Piece:
    """Tokens ``begin`` to ``end`` of all ``documents``, and what follows them."""

    documents: list[int]
    begin: int
    end: int
    children: list[_Piece] = field(default_factory=list)

    def walk(self) -> Iterator[tuple[_Piece, _Piece | None]]:
        """This piece and all below it, parents first, each with its parent; of any depth."""
        waiting: list[tuple[_Piece, _Piece | None]] = [(self, None)]
        while waiting:
            piece, parent = waiting.pop()
            yield piece, parent
            waiting.extend((child, piece) for child in reversed(piece.children))


@hinted(plan)
def pack_tree(
    sequences: Any,
    capacity: int,
    *,
    groups: ArrayLike | None = None,
    shortest: int = SHORTEST,
    overflow: Literal["error", "repeat"] = "error",
    labels: Any = None,
    loss_mask: Any = None,
    prompt_lengths: ArrayLike | None = None,
    columns: Mapping[str, Any] | None = None,
    per_document: Mapping[str, ArrayLike] | None = None,
    pad_id: int = 0,
    weighting: Weighting = "token",
    **plan_options: Any,
) -> PackedBatch:
    """Pack documents into rows in which a common beginning stands once, on any number of levels.

    Documents share their first tokens where ids, labels, masks and columns agree and no token is a target. A tree of
    documents stands in one row. :meth:`PackedBatch.unpack` returns every document whole.

    >>> batch = pack_tree([[7, 8, 9, 1, 2], [7, 8, 9, 3]], 8, prompt_lengths=[3, 3], shortest=2, seed=None)
    >>> batch.input_ids.tolist(), batch.parents.tolist(), batch.position_ids.tolist()
    ([[7, 8, 9, 1, 2, 3, 0, 0]], [-1, 0, 0], [[0, 1, 2, 3, 4, 3, 0, 0]])
    >>> batch.targets.tolist(), batch.predictors.tolist()
    ([[-100, -100, -100, 1, 2, 3, -100, -100]], [[-1, 0, 1, 2, 3, 2, -1, -1]])

    Args:
        sequences, labels, loss_mask, prompt_lengths, columns, per_document, pad_id, weighting: as for ``pack``.
        capacity: tokens a row can hold.
        groups: [N] integers; documents of different groups share nothing. None lets all share.
        shortest: a common beginning of fewer tokens than this is not shared.
        overflow: what to do with a tree of more than ``capacity`` tokens. ``error`` raises; ``repeat`` makes several
            trees of it, each with the shared tokens that its documents need.
        plan_options: ``strategy``, ``seed`` and the other options of ``plan`` for whole trees.

    Raises:
        CapacityError: a tree, or under ``"repeat"`` a document, is longer than ``capacity``.
        PackingError: other bad input, with what, where and the way out.
    """
    if refused := plan_options.keys() & _REFUSED.keys():
        name = min(refused)
        raise PackingError(f"pack_tree takes no {name}: {_REFUSED[name]}")
    if overflow not in ("error", "repeat"):
        raise PackingError(f'overflow is {overflow!r}: pass "error" or "repeat"')
    capacity, shortest = positive("capacity", capacity), positive("shortest", shortest)
    documents = Ragged.of(sequences)
    flat = pack(
        documents,
        max(1, int(documents.lengths.sum())),
        labels=labels,
        loss_mask=loss_mask,
        prompt_lengths=prompt_lengths,
        columns=columns,
        per_document=per_document,
        pad_id=pad_id,
        weighting=weighting,
        strategy="sequential",
        seed=None,
    )
    trees = [part for tree in _trees(flat, groups, shortest) for part in _fitting(tree, capacity, overflow)]
    planned = plan(np.array([_size(tree) for tree in trees]), capacity, **plan_options)
    rows = [[trees[number] for number in row] for row in planned.to_lists()]
    return _materialise(flat, rows, capacity)


def part_saved(lengths: ArrayLike, parents: ArrayLike, documents: ArrayLike, cost: Cost) -> float:
    """The part of a batch's work that its shared beginnings save, at least 0 and less than 1.

    The work of D documents of L tokens is ``a sum(L) + s sum(L^2)``, and that of S segments of n tokens, each after b
    tokens of its ancestors, is ``a sum(n) + s sum(n (n + 2 b))``: a token passes the layers once, and a query meets the
    keys of all tokens before it in its document. ``a`` and ``s`` are those of ``cost``.

    >>> part_saved([60, 20, 20], [-1, 0, 0], [80, 80], Cost(tokens=1, squares=0))
    0.375

    Args:
        lengths: [S] tokens of each segment; parents: [S] the segment that it continues, -1 for none.
        documents: [D] tokens of each document.
        cost: of a token and of a squared length.
    """
    lengths, parents = as_int64(lengths, "lengths"), as_int64(parents, "parents")
    shared, whole = cost.of_segments(lengths, offsets(parents, lengths)).sum(), cost.of_segments(documents).sum()
    return float(1 - shared / whole)


def _trees(flat: PackedBatch, groups: ArrayLike | None, shortest: int) -> list[_Piece]:
    """The documents as trees, in the order of their first documents."""
    count = flat.n_segments
    content = _content(flat)
    begin = flat.flat_starts
    tokens = [content[first : first + most] for first, most in zip(begin, _shareable(flat), strict=True)]
    group = np.zeros(count, np.int64) if groups is None else as_array(groups, "groups")
    if group.shape != (count,) or group.dtype.kind not in "iu":
        raise LayoutError(
            f"groups is {group.dtype} {list(group.shape)}: pass one integer for each of {count} documents"
        )

    # In the order of their content, documents with a common beginning are neighbours, and what several of them share is
    # the least that two neighbours among them do.
    order = np.array(sorted(range(count), key=lambda number: (group[number], tokens[number].tobytes())))
    shared = np.full(count, -1)
    for place, (document, following) in enumerate(pairwise(order.tolist()), 1):
        if group[document] == group[following]:
            shared[place] = _agreeing(tokens[document], tokens[following])
    trees: list[_Piece] = []
    waiting = [(trees, 0, count, 0)]
    while waiting:
        pieces, first, last, at = waiting.pop()  # documents that agree up to token ``at``, and where their pieces go
        begins = first + np.append(0, 1 + np.flatnonzero(shared[first + 1 : last] < at + shortest))
        bounds = [*begins.tolist(), last]
        for run in np.argsort(np.minimum.reduceat(order[first:last], begins - first)).tolist():
            begin, end = bounds[run], bounds[run + 1]
            members = np.sort(order[begin:end]).tolist()
            if len(members) == 1:
                pieces.append(_Piece(members, at, int(flat.lengths[members[0]])))
                continue
            pieces.append(_Piece(members, at, int(shared[begin + 1 : end].min())))
            waiting.append((pieces[-1].children, begin, end, pieces[-1].end))
    return trees


def _shareable(flat: PackedBatch) -> Int64:
    """int64 [N]: how many first tokens of each document may be shared: those before its first target or last token."""
    is_target = np.append(flat.targets.reshape(-1) != IGNORE_INDEX, True)
    places = np.flatnonzero(is_target)
    first = places[np.searchsorted(places, flat.flat_starts)] - flat.flat_starts
    most: Int64 = np.minimum(first, flat.lengths - 1)
    return most


def _content(flat: PackedBatch) -> Array:
    """[T] one opaque item per token that holds its id, label, mask and columns."""
    optional = [array for array in (flat.labels, flat.loss_mask) if array is not None]
    arrays = [flat.input_ids, *optional, *flat.columns.values()]
    if len(arrays) == 1:
        return flat.input_ids.reshape(-1)
    data = [np.ascontiguousarray(array.reshape(-1)).view(np.uint8).reshape(flat.input_ids.size, -1) for array in arrays]
    joined = np.ascontiguousarray(np.concatenate(data, 1))
    return joined.view(np.dtype((np.void, joined.shape[1]))).reshape(-1)


def _agreeing(one: Array, other: Array) -> int:
    """Counts the first items of two arrays that are the same."""
    most = min(len(one), len(other))
    different = one[:most] != other[:most]
    return int(np.argmax(different)) if different.any() else most


def _size(tree: _Piece) -> int:
    return sum(piece.end - piece.begin for piece, _ in tree.walk())


def _fitting(tree: _Piece, capacity: int, overflow: str) -> list[_Piece]:
    """The tree, or under ``"repeat"`` trees of at most ``capacity`` tokens that hold its documents in order."""
    size = _size(tree)
    if size <= capacity:
        return [tree]
    if overflow == "error" and len(tree.documents) > 1:
        raise CapacityError(
            f"the tree of document {tree.documents[0]} and {len(tree.documents) - 1} others that share its beginning "
            f'has {size:,} tokens and capacity is {capacity:,}: pass overflow="repeat", or raise capacity'
        )
    paths: dict[int, list[_Piece]] = {}  # of each document, root first
    for piece, _ in tree.walk():
        for number in piece.documents:
            paths.setdefault(number, []).append(piece)
    parts: list[list[int]] = []
    seen: set[int] = set()
    taken = 0
    for leaf in (piece for piece, _ in tree.walk() if not piece.children):  # neighbours share the most
        number = leaf.documents[0]
        path = paths[number]
        if (whole := sum(piece.end - piece.begin for piece in path)) > capacity:
            raise CapacityError(
                f"document {number} takes {whole:,} tokens and capacity is {capacity:,}: raise capacity, or cut it"
            )
        added = sum(piece.end - piece.begin for piece in path if id(piece) not in seen)
        if not parts or taken + added > capacity:
            parts.append([])
            seen, taken, added = set(), 0, whole
        parts[-1].append(number)
        seen |= {id(piece) for piece in path}
        taken += added
    return [_joined({number: paths[number] for number in part}) for part in parts]


def _joined(paths: Mapping[int, Sequence[_Piece]]) -> _Piece:
    """The tree of documents, each with its path in a larger tree; pieces that follow each other alone are one."""
    copies: dict[int, _Piece] = {}
    root = _Piece([], 0, 0)
    for number, path in paths.items():
        parent = root
        for piece in path:
            if id(piece) not in copies:
                copies[id(piece)] = _Piece([], piece.begin, piece.end)
                parent.children.append(copies[id(piece)])
            parent = copies[id(piece)]
            parent.documents.append(number)
    (tree,) = root.children
    for piece, _ in tree.walk():
        while len(piece.children) == 1:
            piece.end, piece.children = piece.children[0].end, piece.children[0].children
    return tree


def _materialise(flat: PackedBatch, rows: list[list[_Piece]], capacity: int) -> PackedBatch:
    numbers: dict[int, int] = {}  # of pieces among the segments
    parents, row, source, start, length = (list[int]() for _ in range(5))
    for number, trees in enumerate(rows):
        for piece, parent in (pair for tree in trees for pair in tree.walk()):
            numbers[id(piece)] = len(parents)
            parents.append(ROOT if parent is None else numbers[id(parent)])
            row.append(number)
            source.append(piece.documents[0])
            start.append(piece.begin)
            length.append(piece.end - piece.begin)
    row_, source_, start_, length_ = (np.array(x, np.int64) for x in (row, source, start, length))
    at = row_ * capacity + segment_starts(row_, length_)
    size = len(rows) * capacity
    taken = indexes(flat.flat_starts[source_] + start_, length_)
    places = indexes(at, length_)
    padding = indexes(*gaps(at, length_, size))

    def moved(array: Array, fill: int) -> Array:
        out = np.empty(size, array.dtype)
        out[places] = array.reshape(-1)[taken]
        out[padding] = fill
        return out.reshape(len(rows), capacity)

    return PackedBatch(
        input_ids=moved(flat.input_ids, flat.pad_id),
        cu_seqlens=offsets_of(length_),
        rows=row_,
        sources=source_,
        starts=start_,
        labels=None if flat.labels is None else moved(flat.labels, IGNORE_INDEX),
        loss_mask=None if flat.loss_mask is None else moved(flat.loss_mask, 0),
        columns={name: moved(array, 0) for name, array in flat.columns.items()},
        pad_id=flat.pad_id,
        weighting=flat.weighting,
        per_document={name: values[source_] for name, values in flat.per_document.items()},
        parents=np.array(parents, np.int64),
    )
