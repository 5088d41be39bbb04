"""Covering arrays: few cases in which every pair of values of every two factors meets at least once.

    {"window": (None, 9), "sinks": (False, True), ..}  -->  [{"window": None, "sinks": False, ..}, ..]

Greedy, as in AETG (Cohen et al. 1997, https://doi.org/10.1109/32.605761), but over all values and without chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

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


class Needs(NamedTuple):
    """A value that takes an option of `Capabilities`, or a width such as "head_dim 40"."""

    option: str
    value: Any


def declared_pairs(
    build: Callable[..., Any], declared: Capabilities, factors: Mapping[str, Sequence[Any]]
) -> list[tuple[Any, str]]:
    """Every pair of values that a backend declares, among the fields of a case and its dtypes, in some case.

    Args:
        build: makes a case of its fields.
        factors: the values of each field; a mapping in place of one is of several fields.

    Returns:
        Cases, each with the dtype to try it in; none if nothing of a field, or no dtype, is declared.
    """
    taken = declared.options | {f"head_dim {width}" for width in declared.head_dims}
    values = {name: [x for x in of if not isinstance(x, Needs) or x.option in taken] for name, of in factors.items()}
    values["dtype"] = [*declared.dtypes]
    cases = []
    for chosen in pairwise(values) if all(values.values()) else ():
        dtype, fields = chosen.pop("dtype"), dict[str, Any]()
        for name, x in chosen.items():
            value = x.value if isinstance(x, Needs) else x
            fields |= value if isinstance(value, Mapping) else {name: value}
        cases.append((build(**fields), dtype))
    return cases


def _met(chosen: Sequence[tuple[int, int]], one: tuple[int, int], missing: set[Any]) -> int:
    """Counts the missing pairs that the value adds to those that are chosen."""
    return sum(tuple(sorted((one, other))) in missing for other in chosen)
