"""EXP: routed experts, to which padding does not go."""

from __future__ import annotations

import pytest

from conformance.checks import at_padding, check_isolated, check_padding, check_pairs
from conformance.draws import Rows, segment_ids
from conformance.expert_cases import CLAMPED, EXPERT_PAIRS, LAYOUTS, UNGATED, ExpertsCase
from conformance.judge import Judge
from packing_core.protocol import DTYPES

requirement = pytest.mark.requirement


@requirement("EXP-01")
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_tokens_are_the_weighted_sum_of_their_experts(judge: Judge, rows: Rows, top_k: int) -> None:
    judge.check(ExpertsCase(rows, top_k=top_k), only="out")
    judge.check(ExpertsCase(rows, top_k=top_k))


@requirement("EXP-02")
@pytest.mark.parametrize("name", ["x", "weights", "up", "down"])
def test_gradients_of_experts(judge: Judge, name: str) -> None:
    judge.check(ExpertsCase(), only=name)


@requirement("EXP-03")
def test_padding_is_routed_to_no_expert(judge: Judge) -> None:
    case = ExpertsCase()
    check_padding(judge, case)
    for changed in ({}, at_padding(case, judge.dtype)):
        out, _ = judge.ask_case(case, judge.dtype, changed)
        judge.holds(not out[segment_ids(case.rows) == 0].any(), "the output at padding is not exactly 0")


@requirement("EXP-04")
@pytest.mark.parametrize("routing", ["one", "few"])
def test_experts_take_all_tokens_or_none(judge: Judge, routing: str) -> None:
    judge.check(ExpertsCase(routing=routing))


@requirement("EXP-05")
def test_no_document_moves_another_through_an_expert(judge: Judge) -> None:
    check_isolated(judge, ExpertsCase(routing="few"))


@requirement("EXP-06")
def test_clamped_gates_and_biases(judge: Judge) -> None:
    judge.check(ExpertsCase(activation=CLAMPED, biased=True))


@requirement("EXP-07")
def test_experts_without_gates(judge: Judge) -> None:
    judge.check(ExpertsCase(activation=UNGATED))


@requirement("EXP-08")
def test_every_pair_of_experts(judge: Judge) -> None:
    check_pairs(judge, ExpertsCase, EXPERT_PAIRS, DTYPES)
