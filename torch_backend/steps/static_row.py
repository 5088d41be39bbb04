"""The arguments of a packed call in memory that stays where it is, for graphs that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torch_backend.hf.entry import run_inside
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.patched import Patched
from torch_backend.pieces import padding_lengths
from torch_backend.segments import PackedMetadata

# The layers of a decoder: the segments and the arguments of its own forward -> its output.
Run = Callable[[PackedForward, dict[str, Any]], Any]


@dataclass(frozen=True)
class RowForm:
    """The sizes that a graph holds for all of its rows.

    Attributes:
        tokens, entries: of the row and of its list of segments, padding included.
        longest: no segment is longer.
        depth: the most segments that one continues; 0 where none does.
    """

    tokens: int
    entries: int
    longest: int
    depth: int


class StaticRow:
    """The arguments of a decoder's forward for one padded row, in memory that stays where it is.

    Attributes:
        pools: whether the last run left it to its caller to run the pooler, on the documents.
    """

    pools = False

    def __init__(self, state: Patched, form: RowForm, kwargs: Mapping[str, Any], segments: PackedMetadata) -> None:
        self.state, self.form, self.kwargs = state, form, dict(kwargs)
        for name, x in tensors_of(kwargs):
            shape = list(x.shape)
            shape[_axis(x)] = form.tokens
            self.kwargs[name] = x.new_empty(shape)
        device = state.device
        self.boundaries = torch.empty(form.entries + 1, dtype=torch.int32, device=device)
        self.parents = torch.empty(form.entries, dtype=torch.int32, device=device) if form.depth else None
        self.real = torch.empty(form.tokens, dtype=torch.bool, device=device) if state.experts else None
        self.lengths: tuple[int, ...] | None = None
        self.take(kwargs, segments)

    def take(self, kwargs: Mapping[str, Any], segments: PackedMetadata) -> None:
        """Copy the arguments of a call, and pad them."""
        form, tokens, lengths = self.form, segments.tokens, segments.lengths
        assert lengths is not None
        for name, x in tensors_of(kwargs):
            axis, kept = _axis(x), self.kwargs[name]
            kept.narrow(axis, 0, tokens).copy_(x)
            kept.narrow(axis, tokens, form.tokens - tokens).zero_()
        all_lengths = (*lengths, *padding_lengths(tokens, form.tokens, form.tokens, form.longest))
        rest = form.entries - len(all_lengths)
        _write(self.boundaries, [0, *accumulate(all_lengths), *[form.tokens] * rest])
        if self.parents is not None:
            above = segments.parents or ()
            _write(self.parents, [*above, *[-1] * (form.entries - len(above))])
        if self.real is not None:
            self.real[:tokens] = True
            self.real[tokens:] = False
        self.lengths = all_lengths if self.state.layers_need_lengths else None

    def run(self, run: Run) -> Any:
        """The decoder's output for the whole row, without what its pooler alone makes of it: see ``pools``."""
        form, state = self.form, self.state
        segments = PackedMetadata(self.boundaries, form.longest, form.tokens, self.lengths)
        if self.parents is not None:
            segments.continue_segments(self.parents, form.depth)
        forward = PackedForward(segments, (1, form.tokens), state.implementation, sizes=state.anatomy.sizes)
        forward.real, forward.pools_after = self.real, True
        output = run_inside(state, forward, run, forward, dict(self.kwargs))
        self.pools = forward.pooled is not None and getattr(output, "pooler_output", None) is forward.pooled
        if self.pools:
            output["pooler_output"] = None
        return output


def _axis(x: Tensor) -> int:
    """Returns the axis of the tokens in [1, T, ...] or, of positions on several axes, [3, 1, T]."""
    return 1 if x.shape[0] == 1 else 2


def tensors_of(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, x) for name, x in kwargs.items() if isinstance(x, Tensor))


def _write(kept: Tensor, values: list[int]) -> None:
    kept.copy_(torch.tensor(values, dtype=kept.dtype), non_blocking=True)
