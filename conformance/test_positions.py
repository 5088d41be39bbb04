"""POS: where each token stands in its document, and how rotary embeddings use it."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import whole_models
from conformance.draws import FOUR_ROWS, FULL, LONG_DOCUMENTS, LONG_ROW, DecoderCase, RopeCase, documents
from conformance.judge import Judge
from packing_core.protocol import DecoderConfig, segments

requirement = pytest.mark.requirement
OUTPUT = "out"


@requirement("POS-01")
@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [((5, 1, 9, 2, 7), 16), ((3,), 8), ((8, 8, 8), 8), (LONG_DOCUMENTS, LONG_ROW), ((70_000,), 70_000)],
    ids=str,
)
def test_positions_restart(judge: Judge, lengths: tuple[int, ...], capacity: int) -> None:
    batch = judge.collate(documents(*lengths), capacity)
    for row, start, stop in segments(batch.segment_ids):
        judge.equal(
            f"positions of row {row}, tokens {start} to {stop - 1}",
            batch.position_ids[row, start:stop], np.arange(stop - start),
        )  # fmt: skip


@requirement("POS-02")
def test_half_rotary(judge: Judge) -> None:
    judge.check(RopeCase(FULL), only=OUTPUT)


@requirement("POS-03")
def test_interleaved_rotary(judge: Judge) -> None:
    judge.check(RopeCase(FULL, interleaved=True))


@requirement("POS-04")
@pytest.mark.parametrize("turned", [16, 32])
def test_partial_rotary(judge: Judge, turned: int) -> None:
    case = RopeCase(FULL, turned=turned)
    judge.check(case)
    out, _ = judge.ask_case(case, judge.dtype)
    judge.equal("channels that do not turn", out[..., turned:], case.arguments(judge.dtype)["x"][..., turned:])


@requirement("POS-05")
@pytest.mark.parametrize("first", [50, 500, 4_090, 131_072, 1_000_000])
def test_long_positions(judge: Judge, first: int) -> None:
    judge.check(RopeCase(FULL, first=first))


@requirement("POS-06")
def test_every_row_has_its_own_positions(judge: Judge) -> None:
    judge.check(RopeCase(FOUR_ROWS))


@requirement("POS-07")
def test_frequencies_follow_the_length_of_the_document(judge: Judge) -> None:
    # One document beyond the model's original context of 16 tokens, others within it.
    case = DecoderCase(DecoderConfig(max_position_embeddings=16, dynamic_rope_factor=4.0))
    drawn = documents(7, 48, 15, 1, 16, 9, 20)
    whole_models.check_logits(judge, case, whole_models.collated(judge, drawn, 96), drawn)


@requirement("POS-08")
def test_gradients_at_the_frequencies_of_the_document(judge: Judge) -> None:
    case = DecoderCase(DecoderConfig(num_hidden_layers=1, max_position_embeddings=16, dynamic_rope_factor=4.0))
    drawn = documents(7, 48, 15, 1, 16, 9, 20)
    whole_models.check_gradients(judge, case, whole_models.collated(judge, drawn, 96), drawn)
