"""DTYPE: every working dtype has the error of that dtype, and no more."""

from __future__ import annotations

import pytest

from conformance import whole_models
from conformance.checks import check_isolated, check_padding, check_pairs
from conformance.draws import (
    ATTENTION_PAIRS,
    FULL,
    MIXED,
    ONE_LAYER,
    PADDED,
    ROPE_PAIRS,
    SELECTED_PAIRS,
    SEVERAL_ROWS,
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
NARROW = ("bfloat16", "float16")
narrow_dtypes = pytest.mark.parametrize("dtype", NARROW)
heavy = pytest.mark.heavy


@requirement("DTYPE-01")
@every_dtype
@pytest.mark.parametrize("rows", [MIXED, pytest.param(TILES, marks=heavy)], ids=["mixed", "tiles"])
def test_attention(judge: Judge, rows: Rows, dtype: str) -> None:
    judge.check(AttentionCase(rows), dtype)


@requirement("DTYPE-02")
@heavy
def test_attention_with_options(judge: Judge) -> None:
    for pairs in (ATTENTION_PAIRS, SELECTED_PAIRS):
        check_pairs(judge, AttentionCase, pairs, NARROW)


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
def test_rope(judge: Judge) -> None:
    check_pairs(judge, RopeCase, ROPE_PAIRS, DTYPES)


@requirement("DTYPE-06")
@every_dtype
def test_scan(judge: Judge, dtype: str) -> None:
    judge.check(ScanCase(MIXED), dtype)


@requirement("DTYPE-07")
@every_dtype
def test_loss(judge: Judge, dtype: str) -> None:
    judge.loss(LossCase(MIXED, masked=0.2), dtype)
    judge.loss(LossCase(FULL, words=1000, spread=128.0), dtype)


@requirement("DTYPE-08")
@every_dtype
def test_logits(judge: Judge, dtype: str) -> None:
    for case in whole_models.one_layer_cases(judge):
        whole_models.check_logits(judge, case, whole_models.collated(judge, SEVERAL_ROWS, 96), SEVERAL_ROWS, dtype)


@requirement("DTYPE-09")
@heavy
@every_dtype
def test_weight_gradients(judge: Judge, dtype: str) -> None:
    for case in whole_models.one_layer_cases(judge):
        whole_models.check_gradients(judge, case, whole_models.collated(judge, SEVERAL_ROWS, 96), SEVERAL_ROWS, dtype)


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
@narrow_dtypes
def test_mixed_precision(judge: Judge, dtype: str) -> None:
    steps = [[documents(40, 3, 70, seed=i), documents(25, 8, 30, turn=4, seed=i + 9)] for i in range(4)]
    whole_models.check_train(judge, DecoderCase(), steps, capacity=96, dtype=dtype)
