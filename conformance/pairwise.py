"""Covering arrays: few cases in which every pair of values of every two factors meets at least once.

    {"window": (None, 9), "sinks": (False, True), ..}  -->  [{"window": None, "sinks": False, ..}, ..]

Greedy, as in AETG (Cohen et al. 1997, https://doi.org/10.1109/32.605761), but over all values and without chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from conformance.draws import FOUR_ROWS, PADDED, AttentionCase
from packing_core.protocol import Capabilities


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that hold every pair of values; deterministic, and in number near the product of the two longest factors.

    >>> pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
    [{'a': 0, 'b': 0, 'c': 0}, {'a': 0, 'b': 1, 'c': 1}, {'a': 1, 'b': 0, 'c': 1}, {'a': 1, 'b': 1, 'c': 0}]
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    values = [range(len(factors[name])) for name in names]
    missing = {
        ((one, x), (other, y))
        for one, other in combinations(range(len(names)), 2)
        for x in values[one]
        for y in values[other]
    }
    cases = []
    while missing:
        chosen = list(min(missing))  # the first pair that no case holds yet; then the rest, each as it helps most
        for factor in range(len(names)):
            if factor not in dict(chosen):
                chosen.append((factor, max(values[factor], key=lambda x: (_met(chosen, (factor, x), missing), -x))))
        missing -= set(combinations(sorted(chosen), 2))
        picked = {names[factor]: factors[names[factor]][value] for factor, value in chosen}
        cases.append({name: picked[name] for name in factors})
    return cases


def attention_pairs(declared: Capabilities) -> list[AttentionCase]:
    """Every pair of values that a backend declares, among options, widths and layouts, in some case."""
    widths = [(64, 64), *((width, width) for width in (40, 72) if width in declared.head_dims)]
    factors: dict[str, list[Any]] = {
        "rows": [FOUR_ROWS, PADDED],
        "widths": widths + [(64, 32)] * ("narrow_values" in declared.options),
        "heads": [(2, 2)] + [(6, 2)] * ("gqa" in declared.options),
        "causal": [True] + [False] * ("bidirectional" in declared.options),
        "window": [None] + [9] * ("window" in declared.options),
        "softcap": [None] + [4.0] * ("softcap" in declared.options),
        "sinks": [False] + [True] * ("sinks" in declared.options),
        "alibi": [False] + [True] * ("alibi" in declared.options),
        "scale": [None, 0.3],
    }
    cases = []
    for chosen in pairwise(factors):
        (heads, kv_heads), (width, value_width) = chosen.pop("heads"), chosen.pop("widths")
        cases.append(AttentionCase(heads=heads, kv_heads=kv_heads, width=width, value_width=value_width, **chosen))
    return cases


def _met(chosen: Sequence[tuple[int, int]], one: tuple[int, int], missing: set[Any]) -> int:
    """Counts the missing pairs that the value adds to those that are chosen."""
    return sum(tuple(sorted((one, other))) in missing for other in chosen)
