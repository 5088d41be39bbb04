"""Segments that continue others, run by operations on documents, and scans that hand their states on.

    documents   the path to each segment as a document of its own, for what knows documents alone
    tails       each segment behind the last tokens that it continues, for what looks back a few tokens
    by_levels   the segments of one depth after those of the last, each from the state in which its parent ended

All three are made once per batch. The gradient of what several segments continue, a token or a state, is the sum over
them, made in float32 and in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core.storage.forest import lineage, offsets
from packing_core.storage.segment_indexing import indexes
from torch_backend.ops.repeated import repeated
from torch_backend.segments import PackedMetadata, host_lengths, to_device

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Unfolded:
    """Each segment of a forest behind what it continues, or behind the end of that, one after the other.

    Attributes:
        packed: their boundaries, of T' tokens.
        gather: int64 [T'] the token of the forest at each place.
        places: int64 [T] where each token of the forest stands as one of its own segment.
    """

    packed: PackedMetadata
    gather: Tensor
    places: Tensor

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function`` of x [T, ...] along the documents, at each token of the forest."""
        return function(repeated(x, self.gather)).index_select(0, self.places)


def documents(packed: PackedMetadata) -> Unfolded:
    """The whole path to each segment, itself included."""

    def make(packed: PackedMetadata) -> Unfolded:
        lengths, parents = _forest(packed)
        starts = np.cumsum(lengths) - lengths
        segments = np.concatenate([lineage(parents, segment) for segment in range(len(parents))])
        gather = indexes(starts[segments], lengths[segments])
        return _unfolded(packed, gather, offsets(parents, lengths))

    return packed.derived("documents of a forest", make)


def tails(packed: PackedMetadata, width: int) -> Unfolded:
    """The last ``width - 1`` tokens, or as many as there are, before each segment in its document, and the segment."""

    def make(packed: PackedMetadata) -> Unfolded:
        lengths, parents = _forest(packed)
        ends, parts = [np.empty(0, np.int64)], list[Int64]()  # the last of ``ends`` is that of a segment without parent
        for own, above in zip(np.split(np.arange(packed.tokens), np.cumsum(lengths)[:-1]), parents, strict=True):
            before = ends[above + 1] if above >= 0 else ends[0]
            parts.append(np.concatenate([before, own]))
            ends.append(parts[-1][max(0, len(parts[-1]) - (width - 1)) :])
        return _unfolded(packed, np.concatenate(parts), np.array([len(part) for part in parts]) - lengths)

    return packed.derived(("tails of a forest", width), make)


def along_documents(
    packed: PackedMetadata,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    shape: tuple[int, int],
) -> Any:
    """``function(*args, **kwargs)`` of a forest, where ``function`` knows the segments of ``documents(packed)`` alone.

    Args:
        packed: the forest, of B * S tokens.
        function: takes tensors [1, T', ...] in place of those [B, S, ...], and returns such.
        args, kwargs: of the call.
        shape: (B, S).

    Returns:
        What the function returns, [B, S, ...].
    """
    found = documents(packed)

    def along(value: Any, lead: tuple[int, int], change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, tuple | list):
            return tuple(along(each, lead, change) for each in value)
        return change(value) if isinstance(value, Tensor) and tuple(value.shape[:2]) == lead else value

    def to_documents(x: Tensor) -> Tensor:
        return repeated(x.flatten(0, 1), found.gather)[None]

    def to_segments(x: Tensor) -> Tensor:
        return x[0].index_select(0, found.places).unflatten(0, shape)

    given, named = (along(tuple(values), shape, to_documents) for values in (args, kwargs.values()))
    output = function(*given, **dict(zip(kwargs, named, strict=True)))
    return along(output, (1, found.packed.tokens), to_segments)


@dataclass(frozen=True, eq=False)
class Level:
    """The segments of one depth.

    Attributes:
        packed: their boundaries.
        tokens: int64, their tokens in the forest.
        parents: int64, the number of each one's parent among the segments of the depth above; empty for roots.
    """

    packed: PackedMetadata
    tokens: Tensor
    parents: Tensor


def by_levels(packed: PackedMetadata, scan: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None) -> Tensor:
    """A scan of segments that start from the state in which their parent ended.

    Args:
        packed: the segments, with parents.
        scan: of inputs and ``packed`` of one depth, from the states ``initial=[N, ...]``, None for zeros -> output and
            last states.
        inputs: [T, ...] each, some None.

    Returns:
        [T, ...].
    """
    levels, order = packed.derived("levels of a forest", _levels)
    outputs: list[Tensor] = []
    states: Tensor | None = None
    for level in levels:
        taken = (None if x is None else x.index_select(0, level.tokens) for x in inputs)
        initial = None if states is None else repeated(states, level.parents)
        output, states = scan(*taken, level.packed, initial=initial)
        outputs.append(output)
    return torch.cat(outputs).index_select(0, order)


def _levels(packed: PackedMetadata) -> tuple[list[Level], Tensor]:
    """The depths from the roots down, and int64 [T] the place of each token where they follow each other."""
    lengths, parents = _forest(packed)
    starts = np.cumsum(lengths) - lengths
    depth, number = np.zeros(len(parents), np.int64), np.zeros(len(parents), np.int64)
    for segment, above in enumerate(parents.tolist()):
        depth[segment] = depth[above] + 1 if above >= 0 else 0
    levels, order, tokens = list[Level](), np.empty(packed.tokens, np.int64), 0
    for each in range(int(depth.max()) + 1):
        members = np.flatnonzero(depth == each)
        number[members] = np.arange(len(members))
        taken = indexes(starts[members], lengths[members])
        order[taken] = np.arange(tokens, tokens + len(taken))
        tokens += len(taken)
        above = number[parents[members]] if each else np.empty(0, np.int64)
        of_level = PackedMetadata.from_lengths(lengths[members].tolist(), device=packed.device)
        levels.append(Level(of_level, *(_on(packed, x) for x in (taken, above))))
    return levels, _on(packed, order)


def _forest(packed: PackedMetadata) -> tuple[Int64, Int64]:
    assert packed.parents is not None
    return np.array(host_lengths(packed)), np.array(packed.parents)


def _unfolded(packed: PackedMetadata, gather: Int64, before: Int64) -> Unfolded:
    """Segments of the forest behind ``before`` tokens each, which are those of the forest that ``gather`` numbers."""
    lengths, _ = _forest(packed)
    whole = before + lengths
    places = indexes(np.cumsum(whole) - lengths, lengths)
    made = PackedMetadata.from_lengths(whole.tolist(), device=packed.device)
    return Unfolded(made, _on(packed, gather), _on(packed, places))


def _on(packed: PackedMetadata, x: Int64) -> Tensor:
    return to_device(torch.from_numpy(x), packed.device)
