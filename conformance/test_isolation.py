"""ISO: nothing of one segment reaches another, forward or backward."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from conformance import oracle, whole_models
from conformance.checks import check_isolated
from conformance.draws import (
    FOUR_ROWS,
    FULL,
    LONG_DOCUMENTS,
    LONG_ROW,
    MANY_DOCUMENTS,
    MANY_ROWS,
    PADDED,
    PAST_64,
    TILES,
    AttentionCase,
    DecoderCase,
    LossCase,
    Rows,
    ScanCase,
    altered,
    documents,
    segment_ids,
    untrained,
)
from conformance.judge import Judge
from packing_core.protocol import Array, Document

requirement = pytest.mark.requirement
heavy = pytest.mark.heavy


@requirement("ISO-01")
def test_a_segment_moves_no_other_output(judge: Judge) -> None:
    check_isolated(judge, AttentionCase(FULL), backward=False)


@requirement("ISO-02")
def test_a_segment_moves_no_other_gradient(judge: Judge) -> None:
    check_isolated(judge, AttentionCase(FULL))


@requirement("ISO-03")
def test_isolation_beyond_64_segments(judge: Judge) -> None:
    check_isolated(judge, AttentionCase(PAST_64), where=(0, 68, 70, 71))


@requirement("ISO-04")
@pytest.mark.parametrize(
    ("case", "where"),
    [
        (AttentionCase(FOUR_ROWS), (0, 3, 5, 8, 10, 14)),
        (AttentionCase(MANY_ROWS, heads=1, kv_heads=1), (0, 18, 33)),
    ],
    ids=["four rows", "many rows"],
)
def test_rows_are_isolated_each_by_its_own_boundaries(
    judge: Judge, case: AttentionCase, where: tuple[int, ...]
) -> None:
    check_isolated(judge, case, where=where)


@requirement("ISO-05")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window": 6}, id="window"),
        pytest.param({"softcap": 5.0}, id="softcap", marks=heavy),
        pytest.param({"sinks": True}, id="sinks"),
        pytest.param({"alibi": True}, id="alibi", marks=heavy),
        pytest.param({"heads": 6, "kv_heads": 2}, id="gqa"),
        pytest.param({"causal": False}, id="bidirectional", marks=heavy),
    ],
)
def test_isolation_under_every_option(judge: Judge, options: dict[str, object]) -> None:
    check_isolated(judge, AttentionCase(FULL, **options), where=(0, 3, 5))  # type: ignore[arg-type]


@requirement("ISO-06")
@pytest.mark.parametrize(("rows", "where"), [(FULL, None), (MANY_ROWS, (0, 18, 33))], ids=["one row", "many rows"])
def test_no_state_crosses_a_boundary(judge: Judge, rows: Rows, where: tuple[int, ...] | None) -> None:
    check_isolated(judge, ScanCase(rows), where=where)


@requirement("ISO-07")
def test_the_loss_of_a_segment_is_its_own(judge: Judge) -> None:
    case = LossCase(FULL)
    # A one-token segment has no target, so that nothing of it can move.
    where = [i for i, length in enumerate(FULL[0]) if length > 1]
    for dtype in judge.backend.capabilities.dtypes:

        def call(arguments: Mapping[str, Array], dtype: str = dtype) -> dict[str, Array]:
            return {"gradient of the logits": judge.ask_loss(case, dtype, arguments)[0][1]["logits"]}

        judge.isolated(
            call, case.arguments(dtype), segment_ids(case.rows), change=("logits",), dtype=dtype, where=where
        )


@requirement("ISO-08")
def test_a_document_moves_no_other_logits(judge: Judge) -> None:
    whole_models.check_isolated(judge, DecoderCase(), documents(7, 16, 1, 33, 24, 15), 96)


def trained_by(judge: Judge, case: DecoderCase, drawn: list[Document]) -> dict[str, Array]:
    """The loss of one step on the documents, and the weights after it."""
    losses, weights = whole_models.train(judge, case, [[drawn]], capacity=96)
    return {"the loss": losses} | weights


@requirement("ISO-09")
def test_a_document_without_targets_moves_no_gradient(judge: Judge) -> None:
    whole_models.check_untrained_isolated(judge, DecoderCase(), judge.dtype)


@requirement("ISO-10")
def test_a_document_without_targets_moves_no_weight(judge: Judge) -> None:
    case, drawn = DecoderCase(), documents(9, 14, 30, 21, 12)
    silent = [untrained(document) if i == 2 else document for i, document in enumerate(drawn)]
    exchanged = [altered(document) if i == 2 else document for i, document in enumerate(silent)]
    before = trained_by(judge, case, silent)
    noise = judge.noise(lambda: trained_by(judge, case, silent), before)
    after = trained_by(judge, case, exchanged)
    for name, x in before.items():
        judge.unmoved(name, x, after[name], because="an untrained document changed", noise=noise[name])
    start = case.decoder().weights
    judge.holds(
        judge.backend.capabilities.own_model or any(not np.array_equal(start[n], before[n]) for n in start),
        "the step moved no weight at all",
    )


@requirement("ISO-11")
@pytest.mark.parametrize(
    ("row", "where"), [(0, (1, 2)), (0, (3, 4)), (1, (2,))], ids=["16 and 64", "128 and 256", "65"]
)
def test_segments_that_start_beside_tiles(judge: Judge, row: int, where: tuple[int, ...]) -> None:
    check_isolated(judge, AttentionCase((TILES[row],), heads=1, kv_heads=1), where=where)


@requirement("ISO-12")
@heavy
@pytest.mark.parametrize("lengths", [LONG_DOCUMENTS, MANY_DOCUMENTS], ids=["long", "many"])
def test_documents_of_long_rows_are_isolated(judge: Judge, lengths: tuple[int, ...]) -> None:
    case, drawn = whole_models.long_case(judge), whole_models.drawn(judge, *lengths)
    whole_models.check_isolated(judge, case, drawn, LONG_ROW, where=(2, len(drawn) - 1))


@requirement("ISO-13")
@pytest.mark.parametrize("apart", [False, True], ids=["side by side", "apart"])
def test_any_segment_ids(judge: Judge, apart: bool) -> None:
    judge.promised("attention", "arbitrary_ids")
    case = AttentionCase(FOUR_ROWS)
    counted = segment_ids(case.rows)
    everywhere = counted + 10 * np.arange(len(counted))[:, None]  # other ids in every row, neither sorted nor small
    # or one after the other where floating-point numbers have none in between
    ids = np.where(counted > 0, everywhere * 48_611 % 65_521 + 1 if apart else everywhere + 2**24, 0)
    answer = judge.ask_case(case, judge.dtype, ids=ids)
    judge.within(answer, oracle.attention(case, judge.dtype), counted, judge.dtype)


@requirement("ISO-14")
@pytest.mark.parametrize("rows", [FOUR_ROWS, PADDED], ids=["between segments", "behind padding"])
def test_an_id_that_comes_again(judge: Judge, rows: Rows) -> None:
    judge.promised("attention", "arbitrary_ids")
    counted = segment_ids(rows)
    # Two ids in turn; those of the second and the third segment of PADDED, between which padding stands, are one.
    turn = np.where(counted > 2, counted + 1, counted) if rows is PADDED else counted
    ids = np.where(counted > 0, turn % 2 + 1, 0)
    ranks = (1, 4) if "context_parallel" in judge.backend.capabilities.options else (1,)
    for case in (AttentionCase(rows, context_ranks=n) for n in ranks):
        answer = judge.ask_case(case, judge.dtype, ids=ids)
        judge.within(answer, oracle.attention(case, judge.dtype), counted, judge.dtype)
