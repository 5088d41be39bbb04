"""SIZE: sizes for which an implementation may hold a constant, each beyond it, and data that is special."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance import sizes
from conformance.judge import Judge


def requirement(name: str) -> Callable[[Any], Any]:
    """Marks a test with the requirement, and runs it with each of its cases, of which an interpreter takes the rows."""
    cases = [
        pytest.param(case, id=label, marks=[pytest.mark.heavy] * (label != "42 rows"))
        for label, case in sizes.CASES[name].items()
    ]

    def mark(test: Any) -> Any:
        return pytest.mark.requirement(name)(pytest.mark.parametrize("case", cases)(test))

    return mark


@requirement("SIZE-01")
def test_plans(judge: Judge, case: Any) -> None:
    sizes.CHECKS["plan"](judge, case)


@requirement("SIZE-02")
def test_batches(judge: Judge, case: Any) -> None:
    sizes.CHECKS["collate"](judge, case)


@requirement("SIZE-03")
def test_attention(judge: Judge, case: Any) -> None:
    sizes.CHECKS["attention"](judge, case)


@requirement("SIZE-04")
def test_options_of_attention(judge: Judge, case: Any) -> None:
    sizes.CHECKS["attention"](judge, case)


@requirement("SIZE-05")
def test_rotary(judge: Judge, case: Any) -> None:
    sizes.CHECKS["rope"](judge, case)


@requirement("SIZE-06")
def test_kinds_of_rotary(judge: Judge, case: Any) -> None:
    sizes.CHECKS["rope"](judge, case)


@requirement("SIZE-07")
def test_scans(judge: Judge, case: Any) -> None:
    sizes.CHECKS["scan"](judge, case)


@requirement("SIZE-08")
def test_delta_rules(judge: Judge, case: Any) -> None:
    sizes.CHECKS["delta_rule"](judge, case)


@requirement("SIZE-09")
def test_options_of_delta_rules(judge: Judge, case: Any) -> None:
    sizes.CHECKS["delta_rule"](judge, case)


@requirement("SIZE-10")
def test_scans_of_mamba_2(judge: Judge, case: Any) -> None:
    sizes.CHECKS["ssd"](judge, case)


@requirement("SIZE-11")
def test_continued_scans_of_mamba_2(judge: Judge, case: Any) -> None:
    sizes.CHECKS["ssd"](judge, case)


@requirement("SIZE-12")
def test_convolutions(judge: Judge, case: Any) -> None:
    sizes.CHECKS["convolution"](judge, case)


@requirement("SIZE-13")
def test_continued_convolutions(judge: Judge, case: Any) -> None:
    sizes.CHECKS["convolution"](judge, case)


@requirement("SIZE-14")
def test_experts(judge: Judge, case: Any) -> None:
    sizes.CHECKS["experts"](judge, case)


@requirement("SIZE-15")
def test_kinds_of_experts(judge: Judge, case: Any) -> None:
    sizes.CHECKS["experts"](judge, case)


@requirement("SIZE-16")
def test_losses(judge: Judge, case: Any) -> None:
    sizes.CHECKS["loss"](judge, case)


@requirement("SIZE-17")
def test_weights_of_tokens(judge: Judge, case: Any) -> None:
    sizes.CHECKS["loss"](judge, case)


@requirement("SIZE-18")
def test_reductions(judge: Judge, case: Any) -> None:
    sizes.CHECKS["reduce"](judge, case)


@requirement("SIZE-19")
def test_logits(judge: Judge, case: Any) -> None:
    sizes.CHECKS["forward"](judge, case)


@requirement("SIZE-20")
def test_windows_of_models(judge: Judge, case: Any) -> None:
    sizes.CHECKS["forward"](judge, case)


@requirement("SIZE-21")
def test_gradients_of_models(judge: Judge, case: Any) -> None:
    sizes.CHECKS["gradients"](judge, case)


@requirement("SIZE-22")
def test_log_probabilities(judge: Judge, case: Any) -> None:
    sizes.CHECKS["logprobs"](judge, case)


@requirement("SIZE-23")
def test_shared_beginnings(judge: Judge, case: Any) -> None:
    sizes.CHECKS["shared_gradients"](judge, case)


@requirement("SIZE-24")
def test_cut_documents(judge: Judge, case: Any) -> None:
    sizes.CHECKS["context_gradients"](judge, case)


@requirement("SIZE-25")
def test_training(judge: Judge, case: Any) -> None:
    sizes.CHECKS["train"](judge, case)


@requirement("SIZE-26")
def test_training_over_ranks(judge: Judge, case: Any) -> None:
    sizes.CHECKS["train"](judge, case)


@requirement("SIZE-27")
def test_pairs(judge: Judge, case: Any) -> None:
    sizes.CHECKS["preference"](judge, case)
