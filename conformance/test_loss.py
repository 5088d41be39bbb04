"""LOSS: which tokens are targets, and what the loss is divided by."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import models
from conformance.draws import FULL, TWO_ROWS, DecoderCase, LossCase, documents
from conformance.golden import Case, golden
from conformance.judge import Judge
from packing_core.protocol import segments

requirement = pytest.mark.requirement


@requirement("LOSS-01")
def test_the_first_token_of_a_segment_is_no_target(judge: Judge) -> None:
    batch = judge.collate(documents(5, 1, 9, 2, 7, 12), 16)
    for row, start, _ in segments(batch.segment_ids):
        judge.equal(f"label at row {row}, token {start}", batch.labels[row, start], -100)


@requirement("LOSS-02")
@pytest.mark.parametrize("prompt", [0.0, 0.5, 1.0])
def test_labels_stand_beside_their_tokens(judge: Judge, prompt: float) -> None:
    drawn = documents(5, 9, 3, 7, 12, prompt=prompt)
    batch = judge.collate(drawn, 16)
    for document, (row, start, stop) in zip(drawn, models.places(batch, drawn), strict=True):
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
@pytest.mark.parametrize("masked", [0.3, 0.9])
def test_masked_labels_do_not_count(judge: Judge, masked: float) -> None:
    judge.loss(LossCase(TWO_ROWS, masked=masked))


@requirement("LOSS-05")
@pytest.mark.parametrize("rows", [(0,), (0, 1)], ids=["one row", "all rows"])
def test_rows_without_targets(judge: Judge, rows: tuple[int, ...]) -> None:
    case = LossCase(TWO_ROWS, untrained_rows=rows)
    judge.loss(case)
    (total, found), weight = judge.ask_loss(case, judge.dtype)
    if len(rows) == 2:
        judge.equal("loss sum and weight sum", [float(total[0]), weight], [0.0, 0.0])
    judge.equal("gradient in rows without targets", found["logits"][list(rows)], 0 * found["logits"][list(rows)])


@requirement("LOSS-06")
def test_weights_of_tokens(judge: Judge) -> None:
    judge.loss(LossCase(FULL, weighted=True, masked=0.2))


@requirement("LOSS-07")
def test_the_loss_is_a_mean_over_all_labels(judge: Judge) -> None:
    # Rows and documents with very different numbers of targets: a mean of means comes out different.
    drawn = documents(60, 30, seed=1) + documents(50, 40, prompt=0.9, seed=2)
    models.check_gradients(judge, DecoderCase(), models.collated(judge, drawn, 64), drawn)


@requirement("LOSS-08")
def test_accumulation_averages_per_token(judge: Judge) -> None:
    step = [documents(60, 20, seed=1), documents(9, 3, prompt=0.5, seed=2), documents(30, seed=3)]
    models.check_train(judge, DecoderCase(), [step, step[::-1]], capacity=96)


@requirement("LOSS-09")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_average_per_token(judge: Judge, ranks: int) -> None:
    step = [documents(60, 20, seed=1), documents(9, 3, prompt=0.5, seed=2), documents(30, seed=3)] * 2
    models.check_train(judge, DecoderCase(), [step], capacity=96, ranks=ranks)
