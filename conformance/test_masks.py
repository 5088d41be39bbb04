"""MASK: which keys a query sees, and what happens to their scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance import reductions, whole_models
from conformance.checks import check_pairs, compare_mask, visible_keys
from conformance.draws import ATTENTION_PAIRS, FOUR_ROWS, FULL, ONE_LAYER, AttentionCase, DecoderCase, Rows, documents
from conformance.golden import Case, golden
from conformance.judge import Judge
from packing_core.protocol import DecoderConfig

requirement = pytest.mark.requirement
OUTPUT = "out"


def check_mask(judge: Judge, case: Case) -> None:
    rows = tuple(tuple(row) for row in case["rows"])
    seen = visible_keys(judge, rows, causal=bool(case["causal"]), window=case["window"])
    compare_mask(judge, seen, np.array([[[mark == "x" for mark in query] for query in row] for row in case["visible"]]))


def masks(about: str) -> list[object]:
    return [pytest.param(case, id=case["name"]) for case in golden("masks") if case["about"] == about]


@requirement("MASK-01")
@pytest.mark.parametrize("case", masks("document"))
def test_a_query_sees_its_segment_up_to_itself(judge: Judge, case: Case) -> None:
    check_mask(judge, case)


@requirement("MASK-02")
@pytest.mark.parametrize("case", masks("window"))
def test_a_window_shows_so_many_keys(judge: Judge, case: Case) -> None:
    check_mask(judge, case)
    judge.check(AttentionCase(tuple(map(tuple, case["rows"])), window=case["window"]))


@requirement("MASK-03")
@pytest.mark.parametrize("case", masks("window across a boundary"))
def test_a_window_ends_at_the_boundary(judge: Judge, case: Case) -> None:
    check_mask(judge, case)


@requirement("MASK-04")
def test_softcap(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, softcap=5.0, spread=3.0))


@requirement("MASK-05")
def test_sinks(judge: Judge) -> None:
    for spread in (1.0, 100.0):  # and far above all scores
        judge.check(AttentionCase(FULL, heads=4, kv_heads=4, sinks=spread), only=OUTPUT)
        judge.check(AttentionCase(FULL, heads=4, kv_heads=4, sinks=spread))


@requirement("MASK-06")
def test_alibi(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, heads=4, kv_heads=4, alibi=True))


@requirement("MASK-07")
def test_gqa(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, heads=16, kv_heads=2), only=OUTPUT)


@requirement("MASK-08")
def test_mqa(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, heads=8, kv_heads=1))


@requirement("MASK-09")
def test_values_narrower_than_keys(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, width=192, value_width=128))


@requirement("MASK-10")
@pytest.mark.parametrize("case", masks("bidirectional"))
def test_bidirectional(judge: Judge, case: Case) -> None:
    check_mask(judge, case)
    judge.check(AttentionCase(FULL, causal=False))


@requirement("MASK-15")
@pytest.mark.parametrize("case", masks("window both ways"))
def test_a_window_of_bidirectional_attention(judge: Judge, case: Case) -> None:
    check_mask(judge, case)
    judge.check(AttentionCase(FULL, causal=False, window=9))


@requirement("MASK-11")
def test_a_given_scale(judge: Judge) -> None:
    judge.check(AttentionCase(FULL, scale=0.5))


@requirement("MASK-12")
@pytest.mark.parametrize("rows", [FULL, FOUR_ROWS], ids=["one row", "four rows"])
def test_options_together(judge: Judge, rows: Rows) -> None:
    judge.check(AttentionCase(rows, heads=4, kv_heads=2, window=9, softcap=4.0, sinks=True, scale=0.3))


@requirement("MASK-14")
@pytest.mark.heavy
def test_every_pair_of_options(judge: Judge) -> None:
    check_pairs(judge, AttentionCase, ATTENTION_PAIRS, [judge.dtype])


@requirement("MASK-13")
def test_a_models_sliding_window(judge: Judge) -> None:
    case, drawn = DecoderCase(DecoderConfig(sliding_window=4)), documents(3, 4, 5, 16, 17, 40, 20)
    whole_models.check_logits(judge, case, whole_models.collated(judge, drawn, 96), drawn)


WINDOWED = DecoderCase(replace(ONE_LAYER, sliding_window=4))


@requirement("MASK-16")
@pytest.mark.heavy
def test_a_sliding_window_in_gradients(judge: Judge) -> None:
    drawn = documents(3, 4, 5, 16, 17, 40, 20)
    whole_models.check_gradients(judge, WINDOWED, whole_models.collated(judge, drawn, 96), drawn)


@requirement("MASK-17")
def test_a_sliding_window_in_log_probabilities(judge: Judge) -> None:
    reductions.check_logprobs(judge, documents(3, 4, 5, 16, 17, 40, 20), weights=None, case=WINDOWED)


@requirement("MASK-18")
def test_a_sliding_window_in_pooled_states(judge: Judge) -> None:
    reductions.check_embed(judge, documents(3, 4, 5, 16, 17, 40, 20), "mean", case=WINDOWED)


@requirement("MASK-19")
def test_a_sliding_window_in_training(judge: Judge) -> None:
    whole_models.check_train(judge, WINDOWED, [[documents(3, 4, 5, 16), documents(17, 40)]] * 2, capacity=96)


@requirement("MASK-20")
def test_a_sliding_window_under_pairs(judge: Judge) -> None:
    reductions.check_preference(judge, reductions.pairs()[:1], case=WINDOWED)
