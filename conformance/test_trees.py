"""TREE: documents that share a beginning, which is computed once, and segments that go on from the end of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from conformance import models, scans
from conformance.draws import documents
from conformance.judge import Judge
from packing_core.protocol import Document

requirement = pytest.mark.requirement


def grown(stems: Sequence[Document], lengths: Sequence[int], seed: int) -> list[Document]:
    """Each stem continued by an end of each length; only the ends are trained."""
    found = []
    for number, stem in enumerate(stems):
        for end in documents(*lengths, seed=seed + number):
            ids = np.concatenate([stem.input_ids, end.input_ids])
            labels = np.concatenate([np.full(len(stem.input_ids), -100), end.labels])
            found.append(Document(ids, labels))
    return found


@requirement("TREE-01")
@pytest.mark.parametrize("lengths", [(9, 1, 14), (5, 12, 3, 7, 1)], ids=["three answers", "five answers"])
def test_answers_to_one_prompt(judge: Judge, lengths: tuple[int, ...]) -> None:
    models.check_shared(judge, grown(documents(24), lengths, seed=1), 24)


@requirement("TREE-02")
def test_prompts_of_one_system_prompt(judge: Judge) -> None:
    prompts = grown(documents(20), (17, 22), seed=1)
    several = grown(prompts, (6, 1, 11), seed=5)
    models.check_shared(judge, [*several, *documents(13, seed=9)], 20)


@requirement("TREE-03")
def test_delta_rules_go_on_from_the_state_of_their_parent(judge: Judge) -> None:
    scans.check(judge, scans.DeltaCase(scans.FOREST, parents=scans.PARENTS))


@requirement("TREE-04")
def test_scans_of_mamba_2_go_on_from_the_state_of_their_parent(judge: Judge) -> None:
    scans.check(judge, scans.SsdCase(scans.FOREST, parents=scans.PARENTS))


@requirement("TREE-05")
def test_convolutions_see_the_last_tokens_of_their_parent(judge: Judge) -> None:
    scans.check(judge, scans.ConvolutionCase(scans.FOREST, parents=scans.PARENTS))
