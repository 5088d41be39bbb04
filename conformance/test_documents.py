"""DOC: numbers per document: reductions, log-probabilities, and losses over pairs."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import reductions as documents
from conformance.draws import (
    EMPTY_ROWS,
    FOUR_ROWS,
    FULL,
    LONG_TAIL,
    MIXED,
    ONE_LAYER,
    PADDED,
    SEVERAL_ROWS,
    DecoderCase,
    Rows,
    segment_ids,
)
from conformance.draws import documents as draw
from conformance.judge import Judge
from conformance.reductions import HOW, ReduceCase
from packing_core.protocol import DTYPES

requirement = pytest.mark.requirement
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

LAYOUTS = {"one row": FULL, "padding": PADDED, "four rows": FOUR_ROWS}
POOLED = ("first", "last", "mean")
# Segments of FOUR_ROWS: four, five, two and four of them. Documents of up to three pieces in different rows, and not in
# the order in which they stand there.
SPLIT = ((9, 0), (1,), (14, 4, 2), (3, 10), (12, 13), (5, 6, 7, 8), (11,))


@requirement("DOC-01")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_results_are_those_of_each_documents_own_tokens(judge: Judge, rows: Rows, how: str) -> None:
    documents.check_reduce(judge, ReduceCase(rows, how))


@requirement("DOC-02")
@pytest.mark.parametrize("how", HOW)
def test_padding_moves_no_result(judge: Judge, how: str) -> None:
    for rows in (PADDED, LONG_TAIL, EMPTY_ROWS):
        case = ReduceCase(rows, how)
        values = case.arguments(judge.dtype)["values"]
        before, _ = documents.ask(judge, case, judge.dtype)
        other = np.where(segment_ids(rows) == 0, -values, values)
        after, _ = documents.ask(judge, case, judge.dtype, {"values": other})
        judge.unmoved("a document's result", before, after, because="padding changed")
        documents.check_reduce(judge, case)


@requirement("DOC-03")
@pytest.mark.parametrize("how", HOW)
def test_pieces_count_as_one_document(judge: Judge, how: str) -> None:
    documents.check_reduce(judge, ReduceCase(FOUR_ROWS, how, pieces=SPLIT))


@requirement("DOC-04")
@pytest.mark.parametrize("how", HOW)
def test_tokens_that_are_left_out_do_not_count(judge: Judge, how: str) -> None:
    case = ReduceCase(FOUR_ROWS, how, pieces=SPLIT, left_out=0.5, silent=(1, 5))
    documents.check_reduce(judge, case, only=None)
    out, gradients = documents.ask(judge, case, judge.dtype)
    judge.equal("documents without a token that counts", out[[1, 5]], np.zeros(2))
    outside = gradients["values"][~case.arguments(judge.dtype)["where"]]
    judge.equal("the gradient of tokens that are left out", outside, 0 * outside)


@requirement("DOC-05")
@pytest.mark.parametrize("how", HOW)
def test_results_are_isolated(judge: Judge, how: str) -> None:
    documents.check_reduce_isolated(judge, ReduceCase(FOUR_ROWS, how))
    documents.check_reduce_isolated(judge, ReduceCase(FOUR_ROWS, how, pieces=SPLIT))


@requirement("DOC-06")
@pytest.mark.parametrize("how", HOW)
def test_the_gradient_of_the_values(judge: Judge, how: str) -> None:
    case = ReduceCase(PADDED, how)
    documents.check_reduce(judge, case, only="values")
    _, gradients = documents.ask(judge, case, judge.dtype)
    padding = gradients["values"][segment_ids(PADDED) == 0]
    judge.equal("the gradient at padding", padding, 0 * padding)


@requirement("DOC-07")
@pytest.mark.parametrize("prompt", [0.0, 0.4])
def test_log_probabilities_are_those_of_the_document_alone(judge: Judge, prompt: float) -> None:
    documents.check_logprobs(judge, draw(7, 16, 1, 33, 24, 15, 60, prompt=prompt))


@requirement("DOC-08")
def test_gradients_of_log_probabilities(judge: Judge) -> None:
    documents.check_logprobs(judge, draw(7, 16, 1, 33, 24, 15, 60, turn=4), weights=True)
    documents.check_logprobs(judge, draw(96), weights=None)


@requirement("DOC-09")
@every_dtype
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_a_temperature_divides_the_logits_once(judge: Judge, temperature: float, dtype: str) -> None:
    for weights in (False, None):
        documents.check_logprobs(judge, draw(7, 16, 33, 24, 60), temperature=temperature, weights=weights, dtype=dtype)


@requirement("DOC-10")
def test_log_probabilities_are_isolated(judge: Judge) -> None:
    documents.check_logprobs_isolated(judge, draw(7, 16, 5, 33, 24, 11))


@requirement("DOC-11")
def test_a_step_is_a_mean_over_pairs(judge: Judge) -> None:
    documents.check_preference(judge, documents.pairs())


@requirement("DOC-12")
@pytest.mark.parametrize("how", POOLED)
def test_pooled_states_are_those_of_the_document_alone(judge: Judge, how: str) -> None:
    drawn = draw(7, 16, 1, 33, 24, 15, 60)
    documents.check_embed(judge, [*drawn, drawn[0]], how, only="out")
    for length in (1, 96):
        documents.check_embed(judge, draw(length), how)


@requirement("DOC-13")
@pytest.mark.parametrize("how", POOLED)
def test_gradients_of_pooled_states(judge: Judge, how: str) -> None:
    documents.check_embed(judge, draw(7, 16, 1, 33, 24), how)


@requirement("DOC-14")
@pytest.mark.parametrize("how", POOLED)
def test_pooled_states_are_isolated(judge: Judge, how: str) -> None:
    documents.check_embed_isolated(judge, draw(7, 16, 5, 33), how)


@requirement("DOC-15")
@every_dtype
def test_reductions_in_every_dtype(judge: Judge, dtype: str) -> None:
    for how in HOW:
        for case in (ReduceCase(MIXED, how), ReduceCase(FOUR_ROWS, how, pieces=SPLIT, left_out=0.5, silent=(1, 5))):
            documents.check_reduce(judge, case, only=None, dtype=dtype)


@requirement("DOC-16")
@every_dtype
def test_log_probabilities_in_every_dtype(judge: Judge, dtype: str) -> None:
    documents.check_logprobs(judge, SEVERAL_ROWS, weights=None, case=DecoderCase(ONE_LAYER), dtype=dtype)


@requirement("DOC-17")
@every_dtype
def test_pairs_in_every_dtype(judge: Judge, dtype: str) -> None:
    documents.check_preference(judge, documents.pairs(), case=DecoderCase(ONE_LAYER), dtype=dtype)


@requirement("DOC-18")
@every_dtype
def test_pooled_states_in_every_dtype(judge: Judge, dtype: str) -> None:
    for how in POOLED:
        documents.check_embed(judge, SEVERAL_ROWS, how, case=DecoderCase(ONE_LAYER), dtype=dtype)
