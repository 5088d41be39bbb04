"""DTYPE: every working dtype has the error of that dtype, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import whole_models
from conformance.checks import check_isolated, check_padding
from conformance.draws import (
    FOUR_ROWS,
    FULL,
    FULL_SPANS,
    ONE_LAYER,
    PADDED,
    TILES,
    AttentionCase,
    DecoderCase,
    LossCase,
    RopeCase,
    Rows,
    ScanCase,
    documents,
)
from conformance.judge import Judge
from packing_core.protocol import DTYPES

requirement = pytest.mark.requirement
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
narrow_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
heavy = pytest.mark.heavy
# Other groups try each in the first dtype.
OPTIONS = {
    "window": {"window": 6},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "gqa": {"heads": 6, "kv_heads": 2},
    "narrow values": {"value_width": 32},
    "bidirectional": {"causal": False},
    "both ways": {"spans": FULL_SPANS},
    "selected keys": {"top_k": 17},
    "ranks": {"context_ranks": 4},
}


@requirement("DTYPE-01")
@every_dtype
@pytest.mark.parametrize("rows", [FOUR_ROWS, pytest.param(TILES, marks=heavy)], ids=["four rows", "tiles"])
def test_attention(judge: Judge, rows: Rows, dtype: str) -> None:
    judge.check(AttentionCase(rows), dtype)


@requirement("DTYPE-02")
@heavy
@narrow_dtypes
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_with_options(judge: Judge, options: dict[str, object], dtype: str) -> None:
    judge.check(AttentionCase(FULL, **options), dtype)  # type: ignore[arg-type]


@requirement("DTYPE-03")
@pytest.mark.heavy
@narrow_dtypes
def test_long_sums(judge: Judge, dtype: str) -> None:
    # Nearly uniform weights over a thousand keys whose values do not cancel: an accumulator of 8 or 11 bits stops
    # growing long before the end.
    judge.check(AttentionCase(((1024,),), heads=1, kv_heads=1, spread=0.02, value_mean=4.0), dtype)


@requirement("DTYPE-04")
@every_dtype
def test_large_scores(judge: Judge, dtype: str) -> None:
    judge.check(AttentionCase(FULL, spread=300.0), dtype, only="out")


@requirement("DTYPE-05")
@every_dtype
@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"turned": 32}], ids=str)
def test_rope(judge: Judge, options: dict[str, Any], dtype: str) -> None:
    judge.check(RopeCase(FOUR_ROWS, first=10_000, **options), dtype)


@requirement("DTYPE-06")
@every_dtype
def test_scan(judge: Judge, dtype: str) -> None:
    judge.check(ScanCase(FOUR_ROWS), dtype)


@requirement("DTYPE-07")
@every_dtype
def test_loss(judge: Judge, dtype: str) -> None:
    judge.loss(LossCase(FOUR_ROWS, masked=0.2), dtype)


@requirement("DTYPE-08")
@every_dtype
def test_logits(judge: Judge, dtype: str) -> None:
    drawn = documents(7, 16, 1, 33, 24, 15)
    whole_models.check_logits(judge, DecoderCase(ONE_LAYER), whole_models.collated(judge, drawn, 96), drawn, dtype)


@requirement("DTYPE-09")
@heavy
@every_dtype
def test_weight_gradients(judge: Judge, dtype: str) -> None:
    drawn = documents(7, 16, 1, 33, 24, 15)
    whole_models.check_gradients(judge, DecoderCase(ONE_LAYER), whole_models.collated(judge, drawn, 96), drawn, dtype)


@requirement("DTYPE-10")
@every_dtype
def test_isolation_and_padding_of_attention(judge: Judge, dtype: str) -> None:
    check_isolated(judge, AttentionCase(PADDED), where=(0, 3), dtype=dtype)
    check_padding(judge, AttentionCase(PADDED), dtype)


@requirement("DTYPE-11")
@every_dtype
def test_isolation_and_padding_of_a_scan(judge: Judge, dtype: str) -> None:
    check_isolated(judge, ScanCase(PADDED), where=(0, 3), dtype=dtype)
    check_padding(judge, ScanCase(PADDED), dtype)


@requirement("DTYPE-12")
@heavy
@every_dtype
def test_isolation_of_logits(judge: Judge, dtype: str) -> None:
    drawn = documents(7, 16, 1, 33, 24, 15)
    whole_models.check_isolated(judge, DecoderCase(ONE_LAYER), drawn, 96, dtype=dtype, where=(0, 3))


@requirement("DTYPE-13")
@heavy
@every_dtype
def test_isolation_of_weight_gradients(judge: Judge, dtype: str) -> None:
    whole_models.check_untrained_isolated(judge, DecoderCase(ONE_LAYER), dtype)


@requirement("DTYPE-14")
def test_mixed_precision(judge: Judge) -> None:
    steps = [[documents(40, 3, 17, seed=i), documents(25, 8, 30, turn=4, seed=i + 9)] for i in range(4)]
    whole_models.check_train(judge, DecoderCase(), steps, capacity=96, dtype=judge.narrow_dtype)
