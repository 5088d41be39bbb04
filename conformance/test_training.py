"""TRAIN: a packed training run is the per-document training run."""

from __future__ import annotations

import pytest

from conformance import whole_models
from conformance.draws import LONG_DOCUMENTS, LONG_ROW, MANY_DOCUMENTS, DecoderCase, documents
from conformance.judge import Judge

requirement = pytest.mark.requirement


def steps(prompt: float = 0.0, turn: int | None = None) -> whole_models.Steps:
    """Ten steps of two microbatches of documents of mixed lengths."""
    return [
        [
            documents(40, 3, 17, 1, prompt=prompt, seed=2 * i),
            documents(25, 8, 60, prompt=prompt, turn=turn, seed=2 * i + 1),
        ]
        for i in range(10)
    ]


@requirement("TRAIN-01")
def test_ten_sgd_steps(judge: Judge) -> None:
    whole_models.check_train(judge, DecoderCase(), steps(), capacity=96)


@requirement("TRAIN-02")
def test_ten_adamw_steps(judge: Judge) -> None:
    whole_models.check_train(judge, DecoderCase(), steps(turn=6), capacity=96, optimizer="adamw")


@requirement("TRAIN-03")
def test_prompts_are_not_trained_on(judge: Judge) -> None:
    whole_models.check_train(judge, DecoderCase(), steps(prompt=0.5, turn=6)[:5], capacity=96)


@requirement("TRAIN-04")
def test_long_documents_and_many(judge: Judge) -> None:
    step = [whole_models.drawn(judge, *LONG_DOCUMENTS), whole_models.drawn(judge, *MANY_DOCUMENTS)]
    whole_models.check_train(judge, whole_models.long_case(judge), [step], capacity=LONG_ROW)


@requirement("TRAIN-05")
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", id="adamw")])
def test_one_step_moves_every_weight(judge: Judge, optimizer: str) -> None:
    whole_models.check_one_step(judge, optimizer)


@requirement("TRAIN-06")
def test_adamw_in_mixed_precision_over_ranks(judge: Judge) -> None:
    judge.promised("train", "mixed_precision")
    whole_models.check_train(
        judge, DecoderCase(), steps()[:3], capacity=96, optimizer="adamw", ranks=2, dtype=judge.narrow_dtype
    )
