"""ISO: nothing of one segment reaches another, forward or backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from conformance import models
from conformance.draws import (
    FULL,
    PAST_64,
    TWO_ROWS,
    AttentionCase,
    DecoderCase,
    LossCase,
    ScanCase,
    altered,
    documents,
    segment_ids,
    untrained,
)
from conformance.judge import Judge
from packing_core.protocol import Array, Document

requirement = pytest.mark.requirement

Call = Callable[[Mapping[str, Array]], dict[str, Array]]


def output_of(judge: Judge, case: AttentionCase) -> Call:
    """Only the output, and no gradient is asked for."""

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        return {"output": judge.ask_attention(case, judge.dtype, {**arguments, "dout": None})[0]}

    return call


def gradients_of(judge: Judge, case: AttentionCase) -> Call:
    """The gradients that belong to tokens."""

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        found = judge.ask_attention(case, judge.dtype, arguments)[1]
        return {f"gradient of {name}": found[name] for name in ("q", "k", "v")}

    return call


def check_forward(judge: Judge, case: AttentionCase, where: tuple[int, ...] | None = None) -> None:
    judge.isolated(
        output_of(judge, case), case.arguments(judge.dtype), segment_ids(case.rows),
        change=("q", "k", "v"), dtype=judge.dtype, where=where,
    )  # fmt: skip


def check_backward(judge: Judge, case: AttentionCase, where: tuple[int, ...] | None = None) -> None:
    judge.isolated(
        gradients_of(judge, case), case.arguments(judge.dtype), segment_ids(case.rows),
        change=("q", "k", "v", "dout"), dtype=judge.dtype, where=where,
        backward=True,
    )  # fmt: skip


@requirement("ISO-01")
def test_a_segment_moves_no_other_output(judge: Judge) -> None:
    check_forward(judge, AttentionCase(FULL))


@requirement("ISO-02")
def test_a_segment_moves_no_other_gradient(judge: Judge) -> None:
    check_backward(judge, AttentionCase(FULL))


@requirement("ISO-03")
def test_isolation_beyond_64_segments(judge: Judge) -> None:
    case = AttentionCase(PAST_64)
    check_forward(judge, case, where=(0, 68, 70, 71))
    check_backward(judge, case, where=(68, 70))


@requirement("ISO-04")
def test_rows_are_isolated_each_by_its_own_boundaries(judge: Judge) -> None:
    case = AttentionCase(TWO_ROWS)
    check_forward(judge, case)
    check_backward(judge, case, where=(0, 5))


@requirement("ISO-05")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window": 6}, id="window"),
        pytest.param({"softcap": 5.0}, id="softcap"),
        pytest.param({"sinks": True}, id="sinks"),
        pytest.param({"alibi": True}, id="alibi"),
        pytest.param({"heads": 4, "kv_heads": 2}, id="gqa"),
        pytest.param({"causal": False}, id="bidirectional"),
    ],
)
def test_isolation_under_every_option(judge: Judge, options: dict[str, object]) -> None:
    case = AttentionCase(FULL, **options)  # type: ignore[arg-type]
    check_forward(judge, case, where=(0, 3, 5))
    check_backward(judge, case, where=(0, 3))


@requirement("ISO-06")
def test_no_state_crosses_a_boundary(judge: Judge) -> None:
    case = ScanCase(FULL)

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        out, found = judge.ask_scan(case, judge.dtype, arguments)
        return {"output": out} | {f"gradient of {name}": found[name] for name in ("x", "dt", "B", "C")}

    given = case.arguments(judge.dtype)
    judge.isolated(
        call, given, segment_ids(case.rows), change=("x", "B", "C", "dout"), dtype=judge.dtype,
        backward=True,
    )  # fmt: skip


@requirement("ISO-07")
def test_the_loss_of_a_segment_is_its_own(judge: Judge) -> None:
    case = LossCase(FULL)

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        return {"gradient of the logits": judge.ask_loss(case, judge.dtype, arguments)[0][1]["logits"]}

    # A one-token segment has no target, so that nothing of it can move.
    where = [i for i, length in enumerate(FULL[0]) if length > 1]
    judge.isolated(
        call, case.arguments(judge.dtype), segment_ids(case.rows), change=("logits",), dtype=judge.dtype, where=where
    )


@requirement("ISO-08")
def test_a_document_moves_no_other_logits(judge: Judge) -> None:
    case, drawn = DecoderCase(), documents(7, 16, 1, 33, 24, 15)
    before = models.collated(judge, drawn, 96)
    logits = models.forward(judge, case, before, judge.dtype)
    for number, (row, start, stop) in enumerate(models.places(before, drawn)):
        exchanged = [altered(document) if i == number else document for i, document in enumerate(drawn)]
        after = models.collated(judge, exchanged, 96)
        judge.equal("layout of the batch", after.segment_ids, before.segment_ids)
        moved = models.forward(judge, case, after, judge.dtype)
        elsewhere = before.segment_ids > 0
        elsewhere[row, start:stop] = False
        judge.unmoved("logits of others", logits[elsewhere], moved[elsewhere], because=f"document {number} changed")
        judge.holds(
            not np.array_equal(logits[row, start:stop], moved[row, start:stop]),
            f"every token of document {number} changed and its logits did not move",
        )


def everything(judge: Judge, case: DecoderCase, drawn: list[Document]) -> dict[str, Array]:
    """The loss and the gradient of every weight, by name."""
    mean, found = models.gradients(judge, case, models.collated(judge, drawn, 96), judge.dtype)
    return {"the loss": np.array([mean])} | {f"the gradient of {name}": x for name, x in found.items()}


def trained_by(judge: Judge, case: DecoderCase, drawn: list[Document]) -> dict[str, Array]:
    """The loss of one step on the documents, and the weights after it."""
    losses, weights = models.train(judge, case, [[drawn]], capacity=96)
    return {"the loss": losses} | weights


@requirement("ISO-09")
def test_a_document_without_targets_moves_no_gradient(judge: Judge) -> None:
    case, drawn = DecoderCase(), documents(7, 16, 5, 33, 24, 11)
    silent = [untrained(document) if i in (1, 4) else document for i, document in enumerate(drawn)]
    exchanged = [altered(document) if i in (1, 4) else document for i, document in enumerate(silent)]
    before = everything(judge, case, silent)
    noise = judge.noise(lambda: everything(judge, case, silent), before)
    after = everything(judge, case, exchanged)
    for name, x in before.items():
        judge.unmoved(name, x, after[name], because="untrained documents changed", noise=noise[name])
    trained = [altered(document) if i == 0 else document for i, document in enumerate(silent)]
    moved = everything(judge, case, trained)
    judge.holds(
        any(not np.array_equal(before[name], moved[name]) for name in before), "a trained document moved no gradient"
    )


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
