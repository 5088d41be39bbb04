"""DTYPE: every working dtype has the error of that dtype, and no more."""

from __future__ import annotations

import pytest

from conformance import models
from conformance.draws import FULL, TWO_ROWS, AttentionCase, DecoderCase, LossCase, RopeCase, ScanCase, documents
from conformance.judge import Judge
from packing_core.protocol import DTYPES

requirement = pytest.mark.requirement
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
OPTIONS = {
    "window": {"window": 6},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "gqa": {"heads": 4, "kv_heads": 2},
    "narrow values": {"value_width": 32},
    "bidirectional": {"causal": False},
}


@requirement("DTYPE-01")
@every_dtype
def test_attention(judge: Judge, dtype: str) -> None:
    judge.attention(AttentionCase(TWO_ROWS), dtype)


@requirement("DTYPE-02")
@every_dtype
@pytest.mark.parametrize("options", [pytest.param(o, marks=pytest.mark.heavy) for o in OPTIONS.values()], ids=OPTIONS)
def test_attention_with_options(judge: Judge, options: dict[str, object], dtype: str) -> None:
    judge.attention(AttentionCase(FULL, **options), dtype)  # type: ignore[arg-type]


@requirement("DTYPE-03")
@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_long_sums(judge: Judge, dtype: str) -> None:
    # Nearly uniform weights over a thousand keys whose values do not cancel: an accumulator of 8 or 11 bits stops
    # growing long before the end.
    judge.attention(AttentionCase(((1024,),), spread=0.02, value_mean=4.0), dtype)


@requirement("DTYPE-04")
@every_dtype
def test_large_scores(judge: Judge, dtype: str) -> None:
    judge.attention(AttentionCase(FULL, spread=300.0), dtype, only="out")


@requirement("DTYPE-05")
@every_dtype
def test_rope(judge: Judge, dtype: str) -> None:
    judge.rope(RopeCase(TWO_ROWS, first=10_000), dtype)


@requirement("DTYPE-06")
@every_dtype
def test_scan(judge: Judge, dtype: str) -> None:
    judge.scan(ScanCase(TWO_ROWS), dtype)


@requirement("DTYPE-07")
@every_dtype
def test_loss(judge: Judge, dtype: str) -> None:
    judge.loss(LossCase(TWO_ROWS, masked=0.2), dtype)


@requirement("DTYPE-08")
@every_dtype
def test_logits(judge: Judge, dtype: str) -> None:
    drawn = documents(7, 16, 1, 33, 24, 15)
    models.check_logits(judge, DecoderCase(), models.collated(judge, drawn, 96), drawn, dtype)


@requirement("DTYPE-09")
@every_dtype
def test_weight_gradients(judge: Judge, dtype: str) -> None:
    drawn = documents(7, 16, 1, 33, 24, 15)
    models.check_gradients(judge, DecoderCase(), models.collated(judge, drawn, 96), drawn, dtype)
