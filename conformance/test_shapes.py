"""SHAPE: lengths, widths and layouts at which kernels break."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import whole_models
from conformance.draws import (
    ALIKE,
    ALONE,
    EMPTY_ROWS,
    LONG_DOCUMENTS,
    LONG_TAIL,
    MANY_DOCUMENTS,
    PADDING_ALONE,
    AttentionCase,
    DecoderCase,
    Rows,
    ScanCase,
    documents,
    lay_out,
    segment_ids,
)
from conformance.judge import Judge

requirement = pytest.mark.requirement
heavy = pytest.mark.heavy
thorough = pytest.mark.thorough


def check(judge: Judge, rows: Rows) -> None:
    judge.check(AttentionCase(rows))


@requirement("SHAPE-01")
@pytest.mark.parametrize(
    "rows", [((1, 30, 1, 1, 62, 1),), ((1, -95),), ((-95, 1), (1,) * 8 + (-88,))], ids=["among others", "alone", "last"]
)
def test_one_token_documents(judge: Judge, rows: Rows) -> None:
    check(judge, rows)


@requirement("SHAPE-02")
@pytest.mark.parametrize("count", [300, pytest.param(1100, marks=heavy), pytest.param(4100, marks=thorough)])
def test_many_one_token_documents(judge: Judge, count: int) -> None:
    judge.check(AttentionCase(((1,) * count,), heads=1, kv_heads=1))


@requirement("SHAPE-03")
@pytest.mark.parametrize("length", [96, pytest.param(1024, marks=heavy), pytest.param(2100, marks=thorough)])
def test_one_document_fills_the_row(judge: Judge, length: int) -> None:
    if judge.backend.capabilities.interpreted:
        length = min(length, 1024)  # an interpreter visits every tile of 2,100 tokens for minutes
    check(judge, ((length,),))


@requirement("SHAPE-04")
def test_a_tail_longer_than_every_segment(judge: Judge) -> None:
    case = AttentionCase(LONG_TAIL)
    judge.check(case)
    out, gradients = judge.ask_case(case, judge.dtype)
    tail = segment_ids(LONG_TAIL) == 0
    judge.holds(bool(np.isfinite(out[tail]).all()), "the tail's output is not finite")
    for name in ("q", "k", "v"):
        judge.holds(not gradients[name][tail].any(), f"the tail's gradient of {name} is not exactly 0")


@requirement("SHAPE-05")
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(((15, 16, 17, 16, 15, 17),), id="15 to 17"),
        pytest.param(((63, 64, 65),), id="63 to 65"),
        pytest.param(((127, 128, 129),), id="127 to 129"),
        pytest.param(ALIKE, id="alike"),
        pytest.param(((255, 256, 257), (511, -1, 256)), id="255 to 511", marks=thorough),
    ],
)
def test_lengths_around_tiles(judge: Judge, rows: Rows) -> None:
    check(judge, rows)


@requirement("SHAPE-06")
@pytest.mark.parametrize("width", [8, 80, 128, 256, *(pytest.param(n, marks=heavy) for n in (72, 192, 512))])
def test_head_dims(judge: Judge, width: int) -> None:
    judge.check(AttentionCase(((20, 1, 43),), width=width))


@requirement("SHAPE-07")
@pytest.mark.parametrize("rows", [((20, 33, 44),), ((64, 67), (100, 31))], ids=["97", "131"])
def test_capacities_off_any_tile(judge: Judge, rows: Rows) -> None:
    check(judge, rows)


@requirement("SHAPE-08")
@pytest.mark.parametrize("rows", [EMPTY_ROWS, PADDING_ALONE], ids=["rows", "all rows"])
def test_rows_of_padding(judge: Judge, rows: Rows) -> None:
    case = AttentionCase(rows)
    judge.check(case)
    out, _ = judge.ask_case(case, judge.dtype)
    judge.holds(bool(np.isfinite(out).all()), "an output in an empty row is not finite")


@requirement("SHAPE-09")
@pytest.mark.parametrize(
    "rows",
    [
        ((1,) * 96,),
        ALONE,
        ALIKE,
        ((1, 94, 1), (47, 48, 1)),
        EMPTY_ROWS,
        PADDING_ALONE,
        (LONG_DOCUMENTS,),
        ((*MANY_DOCUMENTS, -1),),
    ],
    ids=["one token", "one document", "alike", "both", "rows of padding", "padding alone", "long", "many"],
)
def test_scans(judge: Judge, rows: Rows) -> None:
    judge.check(ScanCase(rows))


@requirement("SHAPE-10")
def test_logits_of_one_token_documents(judge: Judge) -> None:
    drawn = documents(1, 57, 1, 1, 33, 2, 1)
    whole_models.check_logits(judge, DecoderCase(), whole_models.collated(judge, drawn, 96), drawn)
    if not judge.backend.provides("collate"):
        layout, order = whole_models.layout(drawn, [[0, 1, -38], [2, 3, 5, 6, -91], [-63, 4]])
        whole_models.check_logits(judge, DecoderCase(), lay_out(layout, order), order)


@requirement("SHAPE-11")
def test_packing_the_shortest_and_the_longest(judge: Judge) -> None:
    drawn = documents(1, 16, 1, 1, 16, 15, 1)
    batch = judge.collate(drawn, 16)
    whole_models.places(batch, drawn)
    real = (np.asarray(batch.segment_ids) > 0).sum()
    judge.equal("real tokens in the batch", int(real), sum(len(document.input_ids) for document in drawn))
