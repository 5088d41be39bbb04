"""TREE: documents that share a beginning, which is computed once, and segments that go on from the end of others."""

from __future__ import annotations

import pytest

from conformance import scan_cases, whole_models
from conformance.draws import ONE_LAYER, DecoderCase, documents, grown, untrained
from conformance.judge import Judge
from packing_core.protocol import DTYPES, Document

requirement = pytest.mark.requirement


def several_prompts() -> list[Document]:
    """Answers to two prompts, one of them untrained and one of turns; and a document that shares nothing."""
    prompts = grown(documents(20), (17, 22), seed=1)
    first, *others = grown(prompts, (6, 1, 11), seed=5)
    (turns,) = grown(prompts[:1], (14,), seed=7)
    turns.labels[-9:-4] = -100
    return [untrained(first), *others, turns, *documents(13, seed=9)]


@requirement("TREE-01")
@pytest.mark.parametrize("lengths", [(9, 1, 14), (5, 12, 3, 7, 1), (9,)], ids=["three", "five", "one"])
def test_answers_to_one_prompt(judge: Judge, lengths: tuple[int, ...]) -> None:
    whole_models.check_shared(judge, grown(documents(24), lengths, seed=1), 24 * (len(lengths) > 1))


@requirement("TREE-02")
def test_prompts_of_one_system_prompt(judge: Judge) -> None:
    whole_models.check_shared(judge, several_prompts(), 20)


@requirement("TREE-03")
def test_delta_rules_go_on_from_the_state_of_their_parent(judge: Judge) -> None:
    judge.check(scan_cases.DeltaCase(scan_cases.FOREST, parents=scan_cases.PARENTS))


@requirement("TREE-04")
def test_scans_of_mamba_2_go_on_from_the_state_of_their_parent(judge: Judge) -> None:
    judge.check(scan_cases.SsdCase(scan_cases.FOREST, parents=scan_cases.PARENTS))


@requirement("TREE-05")
def test_convolutions_see_the_last_tokens_of_their_parent(judge: Judge) -> None:
    judge.check(scan_cases.ConvolutionCase(scan_cases.FOREST, parents=scan_cases.PARENTS))


@requirement("TREE-06")
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_in_every_dtype(judge: Judge, dtype: str) -> None:
    whole_models.check_shared(judge, several_prompts(), 20, DecoderCase(ONE_LAYER), dtype=dtype)
