"""Preference, reward and policy trainers under context parallelism: the steps of one process, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_context_scored import CASES, ON_FOUR, REFUSED, train

pytestmark = pytest.mark.slow  # starts processes that train


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two ranks, by case."""
    target = tmp_path_factory.mktemp("context") / "results.pt"
    torchrun("torchrun_context_scored.py", str(target))
    found: dict[str, Any] = torch.load(target)
    return found


def assert_same_weights(many: Any, one: dict[str, Any]) -> None:
    """Several ranks, which cut documents, have trained the weights of one process."""
    assert not isinstance(many, str), many  # the text of an error
    assert any(many["straddled"]) and not one["straddled"]
    for name, weight in one["weights"].items():
        assert float((many["weights"][name] - weight).abs().max()) <= 1e-6 * max(1.0, float(weight.abs().max())), name


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_and_log_as_one_process_does(two: dict[str, Any], name: str) -> None:
    many, one = two[name], train(name)
    assert_same_weights(many, one)
    assert len(many["logs"]) == len(one["logs"]) and "num_tokens" in one["logs"][0]
    for found, expected in zip([*many["logs"], many["evaluated"]], [*one["logs"], one["evaluated"]], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=5e-6)  # rewards are differences of sums of some 200


def test_two_groups_of_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """TRL takes the means of entropies and logits over the tokens of a micro-batch of all groups: those are others."""
    torchrun("torchrun_context_scored.py", str(tmp_path / "results.pt"), ranks=4)
    many, one = torch.load(tmp_path / "results.pt")[ON_FOUR], train(ON_FOUR)
    assert_same_weights(many, one)
    compared = ("loss", "grad", "num_", "total", "train_loss", "eval_loss")
    for found, expected in zip(many["logs"], one["logs"], strict=True):
        names = [name for name in expected if name.startswith((*compared, "rewards/", "logps/"))]
        assert len(names) > 1
        assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5, abs=5e-6)


def test_an_audit_of_a_trainer_tells_what_is_exact(two: dict[str, Any]) -> None:
    assert "in 1 rows cut over 2 ranks): exact" in two["audit"], two["audit"]
    assert "contaminated" in two["audit, broken"], two["audit, broken"]


CUT = "UnsupportedError: context parallelism (cp_size=2) cuts documents over ranks, and "
PATCHED = "UnsupportedModelError: enable_packing(trainer) without ParallelismConfig(cp_size=...) does not compute over"
TEXTS = {
    "reward": f"{CUT}a reward model scores each of them at its last token, on a model that is not causal",
    "GRPO": f"{CUT}GRPOTrainer generates them, so the ranks of a group would have different ones: leave cp_size out",
    "RLOO": f"{CUT}RLOOTrainer generates them",
    "reference ahead": f"{CUT}TRL computed the reference's log-probabilities when the trainer was built",
    "router": f"{CUT}TRL computes a router's loss on the tokens of one rank: pass router_aux_loss_coef=0.0",
    "prefixes": "UnsupportedError: documents that are cut over ranks share no prefixes: pack without shared prefixes",
    "metrics": f"{CUT}no rank has the logits of whole ones: leave compute_metrics",
    "logits": "UnsupportedError: documents are cut over 2 ranks, and no rank has the logits of whole ones",
    "patched": PATCHED,
    "patched reference": PATCHED,
}


@pytest.mark.parametrize("name", REFUSED)
def test_trainers_that_need_whole_documents_are_refused(two: dict[str, Any], name: str) -> None:
    assert re.match(re.escape(TEXTS[name]), str(two[name])), two[name]
