"""REP: the same documents packed another way are the same documents."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from conformance import oracle, whole_models
from conformance.draws import (
    FOUR_ROWS,
    FULL,
    LONG_DOCUMENTS,
    LONG_ROW,
    MANY_DOCUMENTS,
    ONE_LAYER,
    REPACKED,
    REPACKED_AS,
    AttentionCase,
    DecoderCase,
    ScanCase,
    documents,
    lay_out,
    segment_ids,
)
from conformance.judge import Judge
from conformance.oracle import Expected
from packing_core.protocol import Array, segments

requirement = pytest.mark.requirement

LENGTHS = (7, 16, 1, 33, 24, 15)
LAYOUTS = {
    "one row": [[0, 1, 2, 3, 4, 5]],
    "another order": [[5, 2, 0, 4, 3, 1]],
    "several rows": [[3, 0, -56], [1, 4, -56], [5, 2, -80]],
    "padding anywhere": [[-96], [-4, 2, 3, -1, 5, -42], [1, -1, 4, -48, 0]],
    "padding-free": [[4, 0, 2, 5, 1, 3]],
}


def moved(x: Array, from_ids: Array, to_ids: Array) -> Array:
    """A ``[B, S, ..]`` array of the documents of FULL, scattered to where they stand in REPACKED; 0 at padding."""
    there = np.zeros((*to_ids.shape, *x.shape[2:]), x.dtype)
    sources = segments(from_ids)
    for (row, start, stop), document in zip(segments(to_ids), REPACKED_AS, strict=True):
        from_row, from_start, from_stop = sources[document]
        there[row, start:stop] = x[from_row, from_start:from_stop]
    return there


def repacked(arrays: Mapping[str, Array], expected: Expected) -> tuple[dict[str, Array], Expected]:
    """Arguments and expectations of FULL as they stand in REPACKED."""
    here, there = segment_ids(FULL), segment_ids(REPACKED)

    def move(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {name: moved(x, here, there) if x.shape[:2] == here.shape else x for name, x in arrays.items()}

    exact, rounded = ((moved(out, here, there), move(found)) for out, found in (expected.exact, expected.rounded))
    return move(arrays), Expected(exact, rounded)


@requirement("REP-01")
def test_attention_of_repacked_documents(judge: Judge) -> None:
    one, other = AttentionCase(FULL), AttentionCase(REPACKED)
    arrays, expected = repacked(one.arguments(judge.dtype), oracle.attention(one, judge.dtype))
    judge.within(judge.ask_case(other, judge.dtype, arrays), expected, segment_ids(REPACKED), judge.dtype)


@requirement("REP-02")
def test_scan_of_repacked_documents(judge: Judge) -> None:
    one, other = ScanCase(FULL), ScanCase(REPACKED)
    arrays, expected = repacked(one.arguments(judge.dtype), oracle.scan(one, judge.dtype))
    judge.within(judge.ask_case(other, judge.dtype, arrays), expected, segment_ids(REPACKED), judge.dtype)


@requirement("REP-03")
@pytest.mark.parametrize(
    ("lengths", "capacity", "order"),
    [(LENGTHS, 48, (3, 5, 1, 0, 4, 2)), (LENGTHS, 96, (0, 1, 2, 3, 4, 5)), ((96,), 96, (0,))],
    ids=["48", "96", "one document"],
)
def test_logits_in_the_collators_rows(
    judge: Judge, lengths: tuple[int, ...], capacity: int, order: tuple[int, ...]
) -> None:
    drawn = documents(*lengths)
    batch = whole_models.collated(judge, [drawn[i] for i in order], capacity)
    whole_models.check_logits(judge, DecoderCase(), batch, drawn)


@requirement("REP-04")
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_logits_in_any_layout(judge: Judge, rows: list[list[int]]) -> None:
    layout, order = whole_models.layout(documents(*LENGTHS), rows)
    whole_models.check_logits(judge, DecoderCase(ONE_LAYER), lay_out(layout, order), order)


@requirement("REP-05")
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_gradients_in_any_layout(judge: Judge, rows: list[list[int]]) -> None:
    layout, order = whole_models.layout(documents(*LENGTHS, prompt=0.3), rows)
    whole_models.check_gradients(judge, DecoderCase(ONE_LAYER), lay_out(layout, order), order)


@requirement("REP-08")
@pytest.mark.heavy
@pytest.mark.parametrize("lengths", [LONG_DOCUMENTS, MANY_DOCUMENTS], ids=["long", "many"])
def test_logits_in_long_rows(judge: Judge, lengths: tuple[int, ...]) -> None:
    drawn = whole_models.drawn(judge, *lengths)
    whole_models.check_logits(
        judge, whole_models.long_case(judge), whole_models.collated(judge, drawn, LONG_ROW), drawn
    )


@requirement("REP-09")
def test_a_row_cut_into_slices(judge: Judge) -> None:
    judge.check(AttentionCase(FOUR_ROWS, context_ranks=4))


@requirement("REP-06")
def test_the_order_of_documents_changes_none_of_them(judge: Judge) -> None:
    drawn = documents(5, 9, 3, 7, 12, 1, 16, prompt=0.3)
    seen = []
    for order in (drawn, drawn[::-1], drawn[3:] + drawn[:3]):
        batch = judge.collate(order, 16)
        where = whole_models.places(batch, drawn)
        judge.equal("number of segments", len(segments(batch.segment_ids)), len(drawn))
        seen.append([(batch.labels[r, a:b].tolist(), batch.position_ids[r, a:b].tolist()) for r, a, b in where])
    judge.holds(seen[0] == seen[1] == seen[2], "labels or positions of a document depend on the order of documents")


@requirement("REP-07")
def test_the_same_documents_in_other_microbatches(judge: Judge) -> None:
    drawn = documents(60, 20, 9, 3, 30, 44, prompt=0.2)
    for microbatches in ([drawn], [drawn[3:], drawn[:3]], [[document] for document in drawn[::-1]]):
        whole_models.check_train(judge, DecoderCase(), [microbatches], capacity=96)
