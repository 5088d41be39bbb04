"""LAY: planning, and the rows that documents come out in."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import whole_models
from conformance.draws import LONG_DOCUMENTS, LONG_ROW, MANY_DOCUMENTS, documents
from conformance.golden import Case, golden
from conformance.judge import Judge
from conformance.naive import best_fit_decreasing
from packing_core.protocol import segments

requirement = pytest.mark.requirement

DRAWN = ((5, 1, 9, 2, 7, 12), (16,), (1, 1, 1), (3, 14, 2, 16, 8, 8, 1, 5, 11))
LONG = (LONG_DOCUMENTS, MANY_DOCUMENTS)
WORDS = 150_000


def plans(strategy: str) -> list[object]:
    return [pytest.param(case, id=case["name"]) for case in golden("plans") if case["strategy"] == strategy]


def rows_of(judge: Judge, case: Case) -> list[list[int]]:
    """The rows that the backend plans, in which every document stands once and no row is too long."""
    lengths, capacity, strategy = case["lengths"], case["capacity"], str(case["strategy"])
    options = set() if strategy == "best_fit" else {strategy}
    rows = [list(map(int, row)) for row in judge.ask("plan", lengths, capacity, strategy=strategy, options=options)]
    judge.equal("the documents in all rows", sorted(d for row in rows for d in row), list(range(len(lengths))))
    fullest = max(sum(lengths[d] for d in row) for row in rows)
    judge.holds(fullest <= capacity, f"a row holds {fullest} tokens and the capacity is {capacity}")
    return rows


def fills(lengths: list[int], rows: list[list[int]]) -> list[int]:
    return sorted(sum(lengths[d] for d in row) for row in rows)


def row_of(lengths: tuple[int, ...]) -> int:
    return LONG_ROW if lengths in LONG else 16


def named(lengths: tuple[int, ...]) -> str:
    return "many" if len(lengths) > 9 else str(lengths)


@requirement("LAY-01")
@pytest.mark.parametrize("lengths", DRAWN + LONG, ids=named)
def test_every_document_stands_once(judge: Judge, lengths: tuple[int, ...]) -> None:
    drawn = documents(*lengths, words=WORDS)
    batch = judge.collate(drawn, row_of(lengths))
    whole_models.places(batch, drawn)
    judge.equal("number of segments", len(segments(batch.segment_ids)), len(drawn))


@requirement("LAY-02")
@pytest.mark.parametrize("lengths", [lengths for lengths in DRAWN if sum(lengths) > 16], ids=str)
def test_no_row_is_overfull(judge: Judge, lengths: tuple[int, ...]) -> None:
    batch = judge.ask("collate", documents(*lengths), 16, options={"capacity"})
    fullest = int((np.asarray(batch.segment_ids) > 0).sum(axis=1).max())
    judge.holds(fullest <= 16, f"a row holds {fullest} real tokens and the capacity is 16")


@requirement("LAY-03")
@pytest.mark.parametrize("lengths", DRAWN + LONG, ids=named)
def test_segment_ids_count_from_one(judge: Judge, lengths: tuple[int, ...]) -> None:
    batch = judge.collate(documents(*lengths), row_of(lengths))
    for row, ids in enumerate(np.asarray(batch.segment_ids)):
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        counted = [int(ids[start]) for start in starts if ids[start] != 0]
        judge.equal(f"segment ids of row {row}", counted, list(range(1, len(counted) + 1)))


@requirement("LAY-04")
def test_a_document_too_long_raises(judge: Judge) -> None:
    judge.ask("collate", documents(5, 16, 3), 16, options={"capacity"})  # as long as the capacity is not too long
    try:
        batch = judge.backend.collate(documents(5, 17, 3), 16)
    except Exception:
        return
    tokens = int((np.asarray(batch.segment_ids) > 0).sum())
    judge.holds(False, f"a document of 17 tokens was packed at capacity 16: {tokens} of 25 tokens came out")


@requirement("LAY-05")
@pytest.mark.parametrize("case", plans("best_fit"))
def test_best_fit_decreasing(judge: Judge, case: Case) -> None:
    rows = rows_of(judge, case)
    judge.equal("tokens per row", fills(case["lengths"], rows), fills(case["lengths"], case["rows"]))


@requirement("LAY-06")
@pytest.mark.parametrize("case", plans("first_fit"))
def test_first_fit_decreasing(judge: Judge, case: Case) -> None:
    lengths = case["lengths"]
    got, expected = (
        sorted(sorted(lengths[d] for d in row) for row in rows) for rows in (rows_of(judge, case), case["rows"])
    )
    judge.holds(got == expected, f"lengths per row: expected {expected}, got {got}")


@requirement("LAY-07")
@pytest.mark.parametrize("case", plans("sequential"))
def test_sequential(judge: Judge, case: Case) -> None:
    rows = rows_of(judge, case)
    judge.holds(rows == case["rows"], f"rows: expected {case['rows']}, got {rows}")


@requirement("LAY-08")
def test_counts_beyond_32_bits(judge: Judge) -> None:
    half = 2**31
    lengths = [half, half - 1, 3, half + 5, 2, half - 5, half]
    for strategy in {"first_fit", "sequential"} & judge.backend.capabilities.options:
        rows_of(judge, {"lengths": lengths, "capacity": 2 * half, "strategy": strategy})
    rows = rows_of(judge, {"lengths": lengths, "capacity": 2 * half, "strategy": "best_fit"})
    judge.equal("tokens per row", fills(lengths, rows), fills(lengths, best_fit_decreasing(lengths, 2 * half)))
