"""Covering arrays hold every pair in few cases, and the attention cases hold every pair that a backend declares."""

from itertools import combinations, product

import pytest

from conformance.pairwise import attention_pairs, pairwise
from packing_core.protocol import ALL_OPTIONS, Capabilities

FACTORS = [
    {"a": (0, 1), "b": (0, 1), "c": (0, 1)},
    {"a": (0, 1, 2, 3), "b": ("x", "y", "z"), "c": (None,), "d": (False, True), "e": (1, 2)},
]


@pytest.mark.parametrize("factors", FACTORS)
def test_every_pair_of_values_meets(factors):
    cases = pairwise(factors)
    for one, other in combinations(factors, 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == set(product(factors[one], factors[other]))
    longest = sorted(len(values) for values in factors.values())[-2:]
    assert len(cases) <= 1.5 * longest[0] * longest[1]


def test_cases_hold_what_is_declared_and_nothing_else():
    cases = attention_pairs(Capabilities(options=ALL_OPTIONS - {"sinks", "gqa", "narrow_values"}, head_dims=(40, 64)))
    assert {case.width for case in cases} == {40, 64}
    assert {case.window for case in cases} == {None, 9}
    assert {case.causal for case in cases} == {case.alibi for case in cases} == {False, True}
    assert {case.softcap for case in cases} == {None, 4.0}
    assert not any(case.sinks or case.kv_heads < case.heads or case.value_width < case.width for case in cases)
