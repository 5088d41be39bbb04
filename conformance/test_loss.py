"""LOSS: which tokens are targets, and what the loss is divided by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from conformance import whole_models
from conformance.draws import ALIKE, ALONE, FOUR_ROWS, FULL, DecoderCase, LossCase, Rows, documents, untrained
from conformance.golden import Case, golden
from conformance.judge import Judge
from packing_core.protocol import Array, Document, segments

requirement = pytest.mark.requirement


def microbatches() -> list[list[Document]]:
    """Nine microbatches of very different numbers of targets; the fifth has none, and the eighth no second token."""
    drawn = [
        documents(60, 20, seed=1), documents(9, 3, prompt=0.5, seed=2), documents(30, seed=3),
        documents(50, 40, turn=5, seed=4), [untrained(document) for document in documents(21, 12, seed=5)],
        documents(8, seed=6), documents(90, 60, seed=7), documents(1, 1, seed=8), documents(40, 9, prompt=0.9, seed=9),
    ]  # fmt: skip
    return drawn


@requirement("LOSS-01")
def test_the_first_token_of_a_segment_is_no_target(judge: Judge) -> None:
    for lengths in ((5, 1, 9, 2, 7, 12), (9,)):
        batch = judge.collate(documents(*lengths), 16)
        for row, start, _ in segments(batch.segment_ids):
            judge.equal(f"label at row {row}, token {start}", batch.labels[row, start], -100)


@requirement("LOSS-02")
@pytest.mark.parametrize(("prompt", "turn"), [(0.0, None), (0.5, None), (1.0, None), (0.0, 2)])
def test_labels_stand_beside_their_tokens(judge: Judge, prompt: float, turn: int | None) -> None:
    for drawn in (documents(5, 9, 3, 7, 12, words=150_000, prompt=prompt, turn=turn), documents(9, prompt=prompt)):
        batch = judge.collate(drawn, 16)
        for document, (row, start, stop) in zip(drawn, whole_models.places(batch, drawn), strict=True):
            judge.equal("labels of a document", batch.labels[row, start + 1 : stop], document.labels[1:])


@requirement("LOSS-03")
@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in golden("losses")])
def test_boundary_labels_do_not_count(judge: Judge, case: Case) -> None:
    logits = np.array(case["logits"], np.float32)
    labels, ids = (np.array(case[name], np.int64) for name in ("labels", "segment_ids"))
    _, weight, dlogits = judge.ask("loss", logits, labels, ids, dtype=judge.dtype)
    judge.equal("weight sum", weight, case["weight_sum"])
    trained = np.abs(dlogits).max(axis=-1) > 0
    judge.equal("tokens whose logits get a gradient", trained, np.array(case["trained"]) == 1)
    judge.loss(LossCase(FULL))


@requirement("LOSS-04")
@pytest.mark.parametrize(("rows", "masked"), [(FOUR_ROWS, 0.3), (FOUR_ROWS, 0.9), (ALONE, 0.3), (ALIKE, 0.3)])
def test_masked_labels_do_not_count(judge: Judge, rows: Rows, masked: float) -> None:
    judge.loss(LossCase(rows, masked=masked))


@requirement("LOSS-05")
@pytest.mark.parametrize("rows", [(0,), (0, 1, 2, 3)], ids=["one row", "all rows"])
def test_rows_without_targets(judge: Judge, rows: tuple[int, ...]) -> None:
    case = LossCase(FOUR_ROWS, untrained_rows=rows)
    judge.loss(case)
    (total, found), weight = judge.ask_loss(case, judge.dtype)
    if len(rows) == len(FOUR_ROWS):
        judge.equal("loss sum and weight sum", [float(total[0]), weight], [0.0, 0.0])
    judge.equal("gradient in rows without targets", found["logits"][list(rows)], 0 * found["logits"][list(rows)])


@requirement("LOSS-06")
def test_weights_of_tokens(judge: Judge) -> None:
    judge.loss(LossCase(FULL, weighted=True, masked=0.2))


@requirement("LOSS-07")
@pytest.mark.parametrize("turn", [None, 7], ids=["prompts", "turns"])
def test_the_loss_is_a_mean_over_all_labels(judge: Judge, turn: int | None) -> None:
    # Rows and documents with very different numbers of targets: a mean of means comes out different.
    drawn = documents(60, 90, seed=1) + documents(50, 40, prompt=0.9 if turn is None else 0.0, turn=turn, seed=2)
    whole_models.check_gradients(judge, DecoderCase(), whole_models.collated(judge, drawn, 96), drawn)


@requirement("LOSS-08")
def test_accumulation_averages_per_token(judge: Judge) -> None:
    step = microbatches()
    whole_models.check_train(judge, DecoderCase(), [step, step[::-1]], capacity=96)


@requirement("LOSS-09")
def test_ranks_average_per_token(judge: Judge) -> None:
    # Three ranks: of unequal shares, one of them without a target, and one without a microbatch.
    step = microbatches()
    silent = [step[0], step[4], step[1]]
    whole_models.check_train(judge, DecoderCase(), [step, silent, step[:2]], capacity=96, ranks=3)


@requirement("LOSS-10")
@pytest.mark.parametrize(("rows", "words"), [(FULL, 1000), (((5, 3),), 150_000)], ids=["1,000", "150,000"])
def test_every_word_counts(judge: Judge, rows: Rows, words: int) -> None:
    judge.loss(LossCase(rows, words=words))


@requirement("LOSS-11")
def test_logits_of_hundreds(judge: Judge) -> None:
    judge.loss(LossCase(FULL, spread=128.0))


@requirement("LOSS-12")
def test_a_batch_without_targets(judge: Judge) -> None:
    judge.promised("gradients", "untrained_batches")
    drawn = [untrained(document) for document in documents(7, 16, 1, 33, 24, 15)]
    mean, named = whole_models.gradients(judge, DecoderCase(), whole_models.collated(judge, drawn, 96), judge.dtype)
    judge.equal("the loss of a batch without targets", mean, 0.0)
    for name, gradient in named.items():
        judge.holds(not np.any(gradient), f"the gradient of {name} of a batch without targets is not 0")


@requirement("LOSS-13")
def test_a_step_without_targets(judge: Judge) -> None:
    judge.promised("train", "untrained_batches")
    step = microbatches()[:2]
    silent = [[untrained(document) for document in microbatch] for microbatch in step]

    def trained() -> Mapping[str, Array]:
        return whole_models.train(judge, DecoderCase(), [step], capacity=96)[1]

    losses, weights = whole_models.train(judge, DecoderCase(), [step, silent], capacity=96)
    before = trained()
    noise = judge.noise(trained, before)
    judge.equal("the loss of a step without targets", losses[1], 0.0)
    for name, weight in weights.items():
        judge.unmoved(name, before[name], weight, because="a step had no targets", noise=noise[name])
