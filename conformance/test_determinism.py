"""DET: the same call gives the same answer, and another call its own."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import reductions, whole_models
from conformance.draws import FULL, ONE_LAYER, AttentionCase, DecoderCase, documents, grown
from conformance.judge import Judge
from conformance.oracle import Expected

requirement = pytest.mark.requirement


@requirement("DET-01")
def test_attention_twice(judge: Judge) -> None:
    case = AttentionCase(FULL)
    (out, gradients), (again_out, again) = (judge.ask_case(case, judge.dtype) for _ in range(2))
    judge.unmoved("the output", out, again_out, because="the call was repeated")
    if not judge.atomic:
        for name, gradient in gradients.items():
            judge.unmoved(f"the gradient of {name}", gradient, again[name], because="the call was repeated")


@requirement("DET-02")
def test_collate_twice(judge: Judge) -> None:
    drawn = documents(5, 9, 3, 7, 12, 1, 16)
    one, other = (judge.collate(drawn, 16) for _ in range(2))
    for name in ("input_ids", "segment_ids", "position_ids", "labels"):
        judge.equal(name, getattr(other, name), getattr(one, name))


@requirement("DET-03")
@pytest.mark.heavy
def test_gradients_twice(judge: Judge) -> None:
    case, drawn = DecoderCase(), documents(7, 16, 1, 33, 24, 15)
    batch = whole_models.collated(judge, drawn, 96)
    (loss, gradients), (again_loss, again) = (whole_models.gradients(judge, case, batch, judge.dtype) for _ in range(2))
    judge.equal("the loss of the second run", again_loss, loss)
    if not judge.atomic:
        for name, gradient in gradients.items():
            judge.unmoved(f"the gradient of {name}", gradient, again[name], because="the call was repeated")


@requirement("DET-04")
def test_train_twice(judge: Judge) -> None:
    steps = [[documents(30, 12, seed=i), documents(21, seed=i + 9)] for i in range(3)]
    (losses, weights), (again_losses, again) = (
        whole_models.train(judge, DecoderCase(), steps, capacity=96) for _ in range(2)
    )
    if judge.atomic:
        judge.within((again_losses, again), Expected((losses, weights), (losses, weights)), None, "float32")
        return
    judge.equal("the losses of the second run", again_losses, losses)
    for name, weight in weights.items():
        judge.holds(bool(np.array_equal(weight, again[name])), f"{name} came out different the second time")


@requirement("DET-05")
def test_other_weights_after_the_first(judge: Judge) -> None:
    drawn = documents(7, 16, 1, 33, 24, 15)
    batch = whole_models.collated(judge, drawn, 96)
    for seed in (0, 1):
        whole_models.check_logits(judge, DecoderCase(seed=seed), batch, drawn)


@requirement("DET-06")
def test_log_probabilities_twice(judge: Judge) -> None:
    for _ in range(2):
        reductions.check_logprobs(judge, documents(7, 16, 1, 33), weights=None, case=DecoderCase(ONE_LAYER))


@requirement("DET-07")
def test_pooled_states_twice(judge: Judge) -> None:
    for _ in range(2):
        reductions.check_embed(judge, documents(7, 16, 1, 33), "mean", case=DecoderCase(ONE_LAYER))


@requirement("DET-08")
def test_pairs_twice(judge: Judge) -> None:
    for _ in range(2):
        reductions.check_preference(judge, reductions.pairs()[:1], case=DecoderCase(ONE_LAYER))


@requirement("DET-09")
def test_shared_beginnings_twice(judge: Judge) -> None:
    for _ in range(2):
        whole_models.check_shared(judge, grown(documents(24), (9, 1, 14), seed=1), 24, DecoderCase(ONE_LAYER))


@requirement("DET-10")
def test_cut_documents_twice(judge: Judge) -> None:
    for _ in range(2):
        whole_models.check_cut(judge, documents(9, 50, 1, 14, seed=3), 2, ONE_LAYER)
