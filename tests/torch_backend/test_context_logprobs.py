"""Losses of log-probabilities whose documents are cut over ranks have the values and the gradients of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.torch_backend.test_torchrun import RANKS
from tests.torch_backend.torchrun import assert_same_loss, torchrun
from tests.torch_backend.torchrun_context_logprobs import (
    BROKEN,
    BROKEN_CASE,
    CASES,
    GROUPED,
    PAIRED,
    REFUSED,
    Case,
    run,
)

pytestmark = pytest.mark.slow  # starts processes that train


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results by case."""
    target = tmp_path_factory.mktemp("context") / "results.pt"
    torchrun("torchrun_context_logprobs.py", str(target), ranks=request.param, limit=220)
    found: dict[str, Any] = torch.load(target)
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_over_documents_are_those_of_one_process(ranks: dict[str, Any], case: str) -> None:
    one, many = run(CASES[case]), ranks[case]
    assert_same_loss(many, one)
    largest = max(1.0, float(one["values"]["logprobs"].abs().max()))
    for name, value in one["values"].items():
        if value is not None:
            found = many["values"][name]
            assert (found.shape, found.dtype) == (value.shape, value.dtype), name
            assert float((found - value).abs().max()) <= 1e-6 * largest, name
    assert CASES[case].bare or many["asked"] < one["asked"]  # no rank has the logits of all tokens


@pytest.mark.parametrize("case", GROUPED)
def test_groups_with_unequal_numbers_of_documents_are_one_batch(ranks: dict[str, Any], case: str) -> None:
    if case not in ranks:
        return  # two ranks are one group
    assert_same_loss(ranks[case], run(Case(GROUPED[case], lengths=PAIRED)))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_exact_is_seen(ranks: dict[str, Any], name: str) -> None:
    assert not isinstance(ranks[name], str), ranks[name]
    with pytest.raises(AssertionError):
        assert_same_loss(ranks[name], run(CASES[BROKEN_CASE]))


OTHER = "LayoutError: the ranks of a context-parallel group call token_logprobs with different options or candidates"
TEXTS = {
    "shared prefixes": "UnsupportedModelError: Qwen3ForCausalLM cannot run shared prefixes: the documents of its",
    "own loss": "UnsupportedModelError: Qwen3ForCausalLM has a loss function of its own",
    "other options": OTHER,
    "other numbers of ids": OTHER,
    "other candidates": OTHER,
    "candidates of one rank": OTHER,
    "other batches": "LayoutError: the ranks of a context-parallel group have different batches",
    "shifted labels": "LayoutError: token_logprobs takes labels as they stand with the tokens",
    "embeddings": "UnsupportedError: a batch with inputs_embeds cannot be cut over ranks",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_log_probabilities_over_ranks_is_refused(ranks: dict[str, Any], case: str) -> None:
    assert re.match(re.escape(TEXTS[case]), str(ranks[case])), ranks[case]
