"""TRAIN: a packed training run is the per-document training run."""

from __future__ import annotations

import pytest

from conformance import models
from conformance.draws import DecoderCase, documents
from conformance.judge import Judge

requirement = pytest.mark.requirement


def steps(prompt: float = 0.0) -> models.Steps:
    """Ten steps of two microbatches of documents of mixed lengths."""
    return [
        [documents(40, 3, 17, 1, prompt=prompt, seed=2 * i), documents(25, 8, 30, prompt=prompt, seed=2 * i + 1)]
        for i in range(10)
    ]


@requirement("TRAIN-01")
def test_ten_sgd_steps(judge: Judge) -> None:
    models.check_train(judge, DecoderCase(), steps(), capacity=64)


@requirement("TRAIN-02")
def test_ten_adamw_steps(judge: Judge) -> None:
    models.check_train(judge, DecoderCase(), steps(), capacity=64, optimizer="adamw")


@requirement("TRAIN-03")
def test_prompts_are_not_trained_on(judge: Judge) -> None:
    models.check_train(judge, DecoderCase(), steps(prompt=0.5), capacity=64)
