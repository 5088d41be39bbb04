"""PAD: padding may stand anywhere, is harmless, and is never trained on."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import whole_models
from conformance.checks import check_padding
from conformance.draws import (
    EMPTY_ROWS,
    PADDED,
    PADDING_ALONE,
    AttentionCase,
    DecoderCase,
    LossCase,
    Rows,
    ScanCase,
    documents,
    lay_out,
    segment_ids,
)
from conformance.judge import Judge
from packing_core.protocol import Gradients

requirement = pytest.mark.requirement
PADDING = segment_ids(PADDED) == 0


@requirement("PAD-01")
def test_padding_anywhere(judge: Judge) -> None:
    judge.check(AttentionCase(PADDED))
    judge.check(AttentionCase(PADDED), only="out")


@requirement("PAD-02")
def test_outputs_at_padding_are_finite(judge: Judge) -> None:
    out, _ = judge.ask_case(AttentionCase(PADDED), judge.dtype)
    judge.holds(bool(np.isfinite(out[PADDING]).all()), "an output at padding is not finite")


@requirement("PAD-03")
def test_gradients_at_padding_are_zero(judge: Judge) -> None:
    _, gradients = judge.ask_case(AttentionCase(PADDED), judge.dtype)
    for name in ("q", "k", "v"):
        judge.holds(not gradients[name][PADDING].any(), f"the gradient of {name} at padding is not exactly 0")


@requirement("PAD-04")
def test_what_stands_at_padding_moves_nothing(judge: Judge) -> None:
    check_padding(judge, AttentionCase(PADDED))


@requirement("PAD-05")
def test_padding_in_a_scan(judge: Judge) -> None:
    judge.check(ScanCase(PADDED))
    judge.check(ScanCase(PADDED), only="out")
    check_padding(judge, ScanCase(PADDED))


@requirement("PAD-06")
@pytest.mark.parametrize("rows", [PADDED, EMPTY_ROWS, PADDING_ALONE], ids=["anywhere", "rows", "all rows"])
def test_labels_at_padding_do_not_count(judge: Judge, rows: Rows) -> None:
    judge.loss(LossCase(rows))


@requirement("PAD-07")
def test_nothing_at_padding_is_a_target(judge: Judge) -> None:
    batch = judge.collate(documents(5, 9, 3, 12), 16)
    padding = np.asarray(batch.segment_ids) == 0
    judge.holds(bool((batch.labels[padding] == -100).all()), "a label at padding is not -100")


@requirement("PAD-08")
def test_the_padding_token_moves_no_logits(judge: Judge) -> None:
    case, drawn = DecoderCase(), documents(*(n for n in PADDED[0] if n > 0))
    before, after = (
        whole_models.forward(judge, case, lay_out(PADDED, drawn, pad_token=token), judge.dtype) for token in (0, 9)
    )
    judge.unmoved("a document's logits", before[~PADDING], after[~PADDING], because="the padding token changed")


@requirement("PAD-09")
def test_the_padding_token_moves_no_gradient(judge: Judge) -> None:
    case, drawn = DecoderCase(), documents(*(n for n in PADDED[0] if n > 0))

    def ask(token: int) -> Gradients:
        mean, gradients = whole_models.gradients(judge, case, lay_out(PADDED, drawn, pad_token=token), judge.dtype)
        return {"loss": np.array([mean]), **gradients}

    before, after = ask(0), ask(9)
    noise = judge.noise(lambda: ask(0), before)
    for name, x in before.items():
        judge.unmoved(name, x, after[name], because="the padding token changed", noise=noise[name])


@requirement("PAD-10")
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["NaN", "Inf"])
def test_what_is_not_finite_at_padding(judge: Judge, value: float) -> None:
    judge.promised("attention", "nonfinite_padding")
    case = AttentionCase(PADDED)
    arrays = case.arguments(judge.dtype)
    changed = {name: np.where(PADDING[..., None, None], np.float32(value), arrays[name]) for name in ("q", "k", "v")}
    check_padding(judge, case, changed=changed)
