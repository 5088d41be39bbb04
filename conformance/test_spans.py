"""SPAN: spans of a segment, such as images, whose tokens see one another in both directions; all else is causal."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.checks import check_isolated, compare_mask, visible_keys
from conformance.draws import FULL, FULL_SPANS, PADDED, AttentionCase, Rows
from conformance.judge import Judge

requirement = pytest.mark.requirement

# Runs of tokens of a row; positive: a span. The second one begins in one segment and ends in the next, so both have
# tokens of its number; a span stands right behind another one.
DRAWN: Rows = ((6, 7, -3),)
DRAWN_SPANS: Rows = ((-1, 3, 4, -2, 2, -4),)
VISIBLE = """
x...............
xxxx............
xxxx............
xxxx............
xxxxxx..........
xxxxxx..........
......xx........
......xx........
......xxx.......
......xxxx......
......xxxxxx....
......xxxxxx....
......xxxxxxx...
................
................
................
"""
PADDED_SPANS: Rows = ((-4, 12, -12, 8, -10, 25, -25),)


@requirement("SPAN-01")
def test_a_query_sees_its_span_and_what_stands_before_it(judge: Judge) -> None:
    seen = visible_keys(judge, DRAWN, spans=DRAWN_SPANS)
    compare_mask(judge, seen, np.array([[[mark == "x" for mark in query] for query in VISIBLE.split()]]))


@requirement("SPAN-02")
@pytest.mark.parametrize(
    ("rows", "spans", "options"),
    [
        pytest.param(FULL, FULL_SPANS, {}, id="full row"),
        pytest.param(PADDED, PADDED_SPANS, {"heads": 6, "kv_heads": 2}, id="padding and gqa"),
        pytest.param(FULL, FULL_SPANS, {"window": 9}, id="window", marks=pytest.mark.heavy),
    ],
)
def test_spans_are_those_of_the_segments_alone(judge: Judge, rows: Rows, spans: Rows, options: dict[str, int]) -> None:
    judge.check(AttentionCase(rows, spans=spans, **options))  # type: ignore[arg-type]


@requirement("SPAN-03")
def test_spans_of_one_number_on_both_sides_of_a_boundary_are_isolated(judge: Judge) -> None:
    check_isolated(judge, AttentionCase(FULL, spans=FULL_SPANS), where=(0, 1, 3))
