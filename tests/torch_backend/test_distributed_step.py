"""``make_train_step`` on several ranks takes the steps of one process on the same documents, whoever holds which."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.torch_backend.models import tiny
from tests.torch_backend.test_torchrun import RANKS
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_loss import plain
from tests.torch_backend.torchrun_step import CASES, train

pytestmark = pytest.mark.slow  # starts processes that train


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics and weights, by case."""
    target = tmp_path_factory.mktemp("step") / "steps.pt"
    torchrun("torchrun_step.py", str(target), ranks=request.param)
    return torch.load(target)


@pytest.mark.parametrize("case", [case for case in CASES if case != "nothing"])
def test_ranks_take_the_steps_of_one(ranks: dict[str, Any], case: str) -> None:
    family = CASES[case].family
    one, many = train(CASES[case], plain(tiny(family)), shares=1, share=0), ranks[case]
    assert not isinstance(many, str), many  # the text of an error
    for found, wanted in zip(many["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert many["replays"] == CASES[case].replays, many["graph"]
    start = dict(tiny(family).named_parameters())
    for name, weight in one["weights"].items():
        assert float((many["weights"][name] - weight).abs().max()) <= 1e-6, name
    assert max(float((weight - start[name].detach()).abs().max()) for name, weight in one["weights"].items()) > 1e-3


def test_ranks_whose_gradients_nothing_reduces_are_refused(ranks: dict[str, Any]) -> None:
    assert re.match(r"UnsupportedError: \d ranks would train Qwen2ForCausalLM apart", ranks["nothing"])


def test_who_reduces_gradients_in_a_way_of_its_own_runs_without_graphs(ranks: dict[str, Any]) -> None:
    reasons = {
        "DDP, communication hook": "a communication hook of DDP reduces the gradients",
        "DDP, static graph": "DDP has a static graph, or a precision of its own",
        "FSDP2, gpt_oss": "the model computes on cpu",
        "FSDP1": "gradients are reduced over ranks during the backward",
    }
    assert {case: ranks[case]["graph"] for case in reasons} == {x: f"no CUDA graph: {y}" for x, y in reasons.items()}
