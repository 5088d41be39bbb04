"""GRAD: the vector-Jacobian product of every operation, and the weight gradients of a packed batch."""

from __future__ import annotations

import pytest

from conformance import whole_models
from conformance.draws import (
    FOUR_ROWS,
    FULL,
    LONG_DOCUMENTS,
    LONG_ROW,
    MANY_DOCUMENTS,
    AttentionCase,
    DecoderCase,
    LossCase,
    RopeCase,
    ScanCase,
    documents,
)
from conformance.judge import Judge

requirement = pytest.mark.requirement


@requirement("GRAD-01")
def test_gradient_of_q(judge: Judge) -> None:
    judge.check(AttentionCase(FULL), only="q")


@requirement("GRAD-02")
def test_gradient_of_k(judge: Judge) -> None:
    judge.check(AttentionCase(FULL), only="k")


@requirement("GRAD-03")
def test_gradient_of_v(judge: Judge) -> None:
    judge.check(AttentionCase(FULL), only="v")


@requirement("GRAD-04")
def test_gradient_of_the_sinks(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, sinks=True))


@requirement("GRAD-05")
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (16, 2)])
def test_gradients_under_gqa(judge: Judge, heads: int, kv_heads: int) -> None:
    case = AttentionCase(FULL, heads=heads, kv_heads=kv_heads)
    judge.check(case, only="k")
    judge.check(case, only="v")


@requirement("GRAD-06")
def test_gradient_of_rope(judge: Judge) -> None:
    judge.check(RopeCase(FOUR_ROWS), only="x")


@requirement("GRAD-07")
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
def test_gradients_of_the_scan(judge: Judge, name: str) -> None:
    judge.check(ScanCase(FULL), only=name)


@requirement("GRAD-08")
def test_gradient_of_the_logits(judge: Judge) -> None:
    judge.loss(LossCase(FOUR_ROWS, masked=0.3))


@requirement("GRAD-09")
@pytest.mark.parametrize("lengths", [(7, 16, 1, 33, 24, 15, 40, 2), (96,)], ids=["several", "one document"])
def test_gradients_of_a_packed_batch(judge: Judge, lengths: tuple[int, ...]) -> None:
    drawn = documents(*lengths)
    whole_models.check_gradients(judge, DecoderCase(), whole_models.collated(judge, drawn, 96), drawn)


@requirement("GRAD-10")
@pytest.mark.heavy
@pytest.mark.parametrize("lengths", [LONG_DOCUMENTS, MANY_DOCUMENTS], ids=["long", "many"])
def test_gradients_of_long_rows(judge: Judge, lengths: tuple[int, ...]) -> None:
    drawn = whole_models.drawn(judge, *lengths)
    whole_models.check_gradients(
        judge, whole_models.long_case(judge), whole_models.collated(judge, drawn, LONG_ROW), drawn
    )
