"""Delta rules, the scan of Mamba-2 and convolutions: cases, and the truth of each document by itself.

The oracle is `packing_core.reference`: the gated delta
rule, the selective scan in which the channels of a head share what Mamba-2 has once per head, and the convolution. Of a
segment that continues others, the document is all of them and itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import numpy as np

from conformance.draws import OperationCase, Rows, round_to, segment_ids
from conformance.oracle import Expected, Result
from conformance.pairwise import Needs
from packing_core import reference
from packing_core.protocol import Array, delta_rule_options, segments
from packing_core.reference import WorkingDtype
from packing_core.storage.forest import lineage

# All layouts are of one shape, so that compiled backends compile once.
FULL: Rows = ((7, 16, 1, 33, 24, 15, 64), (50, 90, 20))
PADDED: Rows = ((-160,), (-5, 9, 17, -3, 1, 30, 14, -17, 60, -4))
# Documents that start and end around multiples of 32, 64 and 128.
EDGES: dict[str, Rows] = {
    "31 to 65": ((31, 32, 33, 63, 1), (64, 65, 31)),
    "127 to 129": ((127, 33), (128, 32)),
    "one token": ((1,) * 160, (1, 129, 1, 1, 1, 27)),
    "a row": ((160,),),
    "alike": ((32,) * 5, (32,) * 5),
    "none": ((-160,), (-160,)),
}
# The documents that are changed stand in front of some that start at multiples of 32 and 64.
ON_EDGES: Rows = ((32, 32, 33, 31, 32), (64, 64, 32))
ON_EDGES_CHANGED = (0, 1, 3, 5, 6)
# Padding everywhere, more than 64 tokens and more than 16 segments.
MIXED: Rows = ((-3, 90, -2, 1, 40, -24), (2,) * 40 + (80,))
# A prompt of 70 with answers of 2, 20 and 1, of which two go on; one of 64 with two answers; a document of 33.
FOREST: Rows = ((70, 2, 20, -3, 33, 9, 1, -22), (64, 32, 31, 33))
PARENTS = (-1, 0, 0, 2, 1, 0, -1, 6, 6, -1)


class _ContinuedCase(OperationCase):
    """One call of an operation whose segments may go on from others.

    Attributes:
        parents: of the segments; None for none.
    """

    parents: tuple[int, ...] | None

    def options(self) -> dict[str, Any]:
        return {} if self.parents is None else {"parents": np.array(self.parents)}

    def taken(self, arrays: Mapping[str, Any]) -> set[str]:
        return set() if self.parents is None else {"continued_segments"}


@dataclass(frozen=True)
class DeltaCase(_ContinuedCase):
    """One call of `Backend.delta_rule`.

    Attributes:
        heads: of v, g and beta.
        key_heads: of q and k.
        decay: the mean of ``-g``, whose values lie from half to three halves of it.
        by_channel: g has a value for each key channel.
        normalise: q and k are not normalised before the call, but in it.
        strongest: the largest beta.
    """

    method = "delta_rule"
    isolated = ("v", "k", "g", "beta", "dout")
    padded = ("q", "k", "v", "g", "beta")
    rows: Rows = PADDED
    heads: int = 2
    key_heads: int = 2
    width: int = 32
    value_width: int = 32
    decay: float = 0.1
    by_channel: bool = False
    normalise: bool = False
    parents: tuple[int, ...] | None = None
    seed: int = 0
    strongest: float = field(default=1.0, repr=False)

    @property
    def head_dim(self) -> int:
        return self.width

    def options(self) -> dict[str, Any]:
        return super().options() | {"normalise": self.normalise}

    def taken(self, arrays: Mapping[str, Any]) -> set[str]:
        return super().taken(arrays) | delta_rule_options(
            arrays["q"], arrays["v"], arrays["g"], normalise=self.normalise
        )

    def fitted(self, head_dims: Collection[int]) -> Self:
        if self.width in head_dims:
            return self
        width = min(head_dims)
        return replace(self, width=width, value_width=width)

    def drawn(self, draw: np.random.Generator, ids: Array) -> dict[str, Array]:
        keys = (*ids.shape, self.key_heads, self.width)
        decays = (*ids.shape, self.heads, *([self.width] if self.by_channel else []))
        arrays = {
            "q": draw.standard_normal(keys),
            "k": draw.standard_normal(keys),
            "v": draw.standard_normal((*ids.shape, self.heads, self.value_width)),
            "g": -self.decay * draw.uniform(0.5, 1.5, decays),
            "beta": draw.uniform(0.1, self.strongest, (*ids.shape, self.heads)),
            "dout": draw.standard_normal((*ids.shape, self.heads, self.value_width)) * (ids > 0)[..., None, None],
        }
        if not self.normalise:
            arrays |= {name: _normalised(arrays[name]) for name in ("q", "k")}
        return arrays

    def sound(self, arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
        """Arguments with k of norm 1, g below 0 and beta in 0..1.

        With longer keys the recurrence itself grows beyond all bounds.
        """
        changed = dict(arrays)
        if not self.normalise:
            changed["k"] = round_to(dtype, _normalised(arrays["k"]))
        changed["g"] = -np.abs(arrays["g"])
        changed["beta"] = np.minimum(np.abs(arrays["beta"]), 1)
        return changed


DELTA_PAIRS: dict[str, list[Any]] = {
    "rows": [{"rows": ON_EDGES}, {"rows": MIXED}, Needs("continued_segments", {"rows": FOREST, "parents": PARENTS})],
    "heads": [{}, Needs("grouped_values", {"heads": 4}), Needs("channel_decay", {"by_channel": True})],
    "normalise": [False, Needs("normalise", True)],
    "decay": [0.1, 0.0, 2.0],
    "value_width": [32, 16, 64],
}


@dataclass(frozen=True)
class SsdCase(_ContinuedCase):
    """One call of `Backend.ssd`.

    Attributes:
        strongest: the largest ``-A``; the smallest is one over it.
    """

    method = "ssd"
    isolated = ("x", "dt", "B", "dout")
    padded = ("x", "dt", "B", "C")
    rows: Rows = PADDED
    heads: int = 4
    groups: int = 2
    width: int = 16
    states: int = 16
    parents: tuple[int, ...] | None = None
    seed: int = 0
    strongest: float = field(default=16.0, repr=False)

    def drawn(self, draw: np.random.Generator, ids: Array) -> dict[str, Array]:
        return {
            "x": draw.standard_normal((*ids.shape, self.heads, self.width)),
            "dt": draw.uniform(0.01, 0.5, (*ids.shape, self.heads)),
            "A": -(self.strongest ** draw.uniform(-1, 1, self.heads)),  # some forget nothing in 64 tokens
            "B": draw.standard_normal((*ids.shape, self.groups, self.states)),
            "C": draw.standard_normal((*ids.shape, self.groups, self.states)),
            "D": draw.standard_normal(self.heads),
            "dout": draw.standard_normal((*ids.shape, self.heads, self.width)) * (ids > 0)[..., None, None],
        }

    def sound(self, arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
        return {**arrays, "dt": np.abs(arrays["dt"])}


@dataclass(frozen=True)
class ConvolutionCase(_ContinuedCase):
    """One call of `Backend.convolution`."""

    method = "convolution"
    isolated = ("x", "dout")
    padded = ("x",)
    rows: Rows = PADDED
    channels: int = 6
    width: int = 4
    parents: tuple[int, ...] | None = None
    seed: int = 0

    def drawn(self, draw: np.random.Generator, ids: Array) -> dict[str, Array]:
        return {
            "x": draw.standard_normal((*ids.shape, self.channels)),
            "weight": draw.standard_normal((self.channels, self.width)),
            "bias": draw.standard_normal(self.channels),
            "dout": draw.standard_normal((*ids.shape, self.channels)) * (ids > 0)[..., None],
        }


Case = DeltaCase | SsdCase | ConvolutionCase
_OF_HEADS = ("A", "D", "weight", "bias")  # arguments that have no axes of tokens


def _normalised(x: Array) -> Array:
    """The last axis of norm 1, as Qwen3-Next normalises it: 1e-6 stands under the root."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


# -- the oracle --------------------------------------------------------------------------------------------------------


@cache
def expected(case: Case, dtype: WorkingDtype) -> Expected:
    """Output and gradients of every argument, each document run alone: what a segment continues, and the segment."""
    arrays, places = case.arguments(dtype), segments(segment_ids(case.rows))
    parents = case.parents or (-1,) * len(places)

    def alone(mine: dict[str, Array], arithmetic: WorkingDtype) -> Result:
        if isinstance(case, SsdCase):
            return _ssd_alone(case, mine, arithmetic)
        if isinstance(case, ConvolutionCase):
            return _convolution_alone(mine, arithmetic)
        return _delta_rule_alone(case, mine, arithmetic)

    def compute(arithmetic: WorkingDtype) -> Result:
        out = np.zeros(arrays["dout"].shape)
        gradients = {name: np.zeros(x.shape) for name, x in arrays.items() if name != "dout"}
        for number, (row, start, stop) in enumerate(places):
            path = [places[segment] for segment in lineage(parents, number)]
            here = row, np.concatenate([np.arange(first, end) for _, first, end in path])
            before = len(here[1]) - (stop - start)
            mine = {name: x if name in _OF_HEADS else x[here].copy() for name, x in arrays.items()}
            mine["dout"][:before] = 0.0  # those outputs are of other segments
            whole, found = alone(mine, arithmetic)
            out[row, start:stop] = whole[before:]
            for name, gradient in found.items():
                gradients[name][... if name in _OF_HEADS else here] += gradient
        return out, gradients

    return Expected(compute("float64"), compute(dtype))


def _delta_rule_alone(case: DeltaCase, arrays: dict[str, Array], arithmetic: WorkingDtype) -> Result:
    length, group = len(arrays["v"]), case.heads // case.key_heads
    before = {name: arrays[name].astype(np.float64) for name in ("q", "k")}
    q, k = (np.repeat(_normalised(x) if case.normalise else x, group, axis=1) for x in before.values())
    v, g, beta, bounds = arrays["v"], arrays["g"], arrays["beta"], [0, length]
    out = reference.gated_delta_rule(q, k, v, g, beta, bounds, dtype=arithmetic)
    found = reference.gated_delta_rule_vjp(q, k, v, g, beta, bounds, arrays["dout"], dtype=arithmetic)
    for name, x in before.items():
        found[name] = found[name].reshape(length, case.key_heads, group, case.width).sum(axis=2)
        if case.normalise:
            found[name] = normalised_vjp(x, found[name])
    return out, {**found}


def normalised_vjp(x: Array, dout: Array) -> Array:
    """The gradient of what is normalised: what lies along it is lost."""
    norm = np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
    return dout / norm - x * (x * dout).sum(axis=-1, keepdims=True) / norm**3


def _convolution_alone(arrays: dict[str, Array], arithmetic: WorkingDtype) -> Result:
    operands: Any = {name: arrays[name] for name in ("x", "weight", "bias")}
    operands |= {"cu_seqlens": [0, len(arrays["x"])], "dtype": arithmetic}
    return reference.short_convolution(**operands), reference.short_convolution_vjp(**operands, dy=arrays["dout"])


def _ssd_alone(case: SsdCase, arrays: dict[str, Array], arithmetic: WorkingDtype) -> Result:
    """The selective scan over channels ``(head, channel)``, whose rates are equal inside a head."""
    length, heads, width = arrays["x"].shape
    dy = arrays["dout"].reshape(length, -1)
    by_channel: Any = {
        "x": arrays["x"].reshape(length, -1),
        "dt": np.repeat(arrays["dt"], width, axis=1),
        "A": np.repeat(arrays["A"], width)[:, None] * np.ones(case.states),
        "B": arrays["B"],
        "C": arrays["C"],
        "D": np.repeat(arrays["D"], width),
        "cu_seqlens": [0, length],
        "dtype": arithmetic,
    }
    out = reference.selective_scan(**by_channel)
    found = reference.selective_scan_vjp(**by_channel, dy=dy)
    return out.reshape(arrays["x"].shape), {
        "x": found["x"].reshape(arrays["x"].shape),
        "dt": found["dt"].reshape(length, heads, width).sum(axis=2),
        "A": found["A"].reshape(heads, -1).sum(axis=1),
        "B": found["B"],
        "C": found["C"],
        "D": found["D"].reshape(heads, width).sum(axis=1),
    }
