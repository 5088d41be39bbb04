"""Trainers whose documents are cut over ranks, by accelerate's ``cp_size``: the steps of one process, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_context_trainer import (
    CASES,
    COUNTS,
    LOGGED,
    MICROBATCHES,
    ON_FOUR,
    ROUTERS,
    Case,
    train,
)

pytestmark = pytest.mark.slow  # starts processes that train


def results_of(target: Path, ranks: int) -> dict[str, Any]:
    torchrun("torchrun_context_trainer.py", str(target), ranks=ranks)
    found: dict[str, Any] = torch.load(target)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two ranks, by case."""
    return results_of(tmp_path_factory.mktemp("context") / "results.pt", 2)


def assert_same_run(many: Any, case: Case) -> None:
    """The ranks have logged and trained what one process logs and trains."""
    assert not isinstance(many, str), many  # the text of an error
    one = train(case)
    assert any(many["straddled"])
    assert re.search(r"in 18 rows of 96 tokens, 76.1% full, by PackedCollator .*, cut over 2 ranks", many["explained"])
    assert len(many["loss"]) == 2
    for name in LOGGED:
        assert one[name] and many[name] == pytest.approx(one[name], rel=1e-5), name
    for name in COUNTS:
        assert many[name] == one[name], name
    assert bool(one["num_tokens"]) == bool(one["eval_num_tokens"]) == (case.kind == "SFTTrainer")
    assert bool(one["num_input_tokens_seen"]) == ("include_num_input_tokens_seen" in case.options)
    for name in ROUTERS:
        assert many[name] == pytest.approx(one[name], rel=1e-5)
        assert bool(one[name]) == ("router_aux_loss_coef" in case.options)
    assert many["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    for name, weight in one["weights"].items():
        assert float((many["weights"][name] - weight).abs().max()) <= 1e-6 * max(1.0, float(weight.abs().max())), name


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(two: dict[str, Any], name: str) -> None:
    assert_same_run(two[name], CASES[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_two_groups_of_two_ranks_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    assert_same_run(results_of(tmp_path / "results.pt", 4)[name], ON_FOUR[name]._replace(groups=1))


def test_a_run_goes_on_from_a_checkpoint_of_fsdp2(two: dict[str, Any]) -> None:
    assert not isinstance(two["resumed"], str), two["resumed"]
    whole, resumed = two["resumed"]["whole"], two["resumed"]["resumed"]
    assert (whole["microbatches"], resumed["microbatches"]) == (4 * MICROBATCHES, 2 * MICROBATCHES)
    assert len(whole["loss"]) == 4 and resumed["loss"] == whole["loss"]
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())


@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer", "broken"])
def test_an_audit_of_a_trainer_tells_what_is_exact(two: dict[str, Any], name: str) -> None:
    assert not isinstance(two[f"audit, {name}"], str), two[f"audit, {name}"]
    verdict, words = two[f"audit, {name}"]
    assert verdict == ("contaminated" if name == "broken" else "exact"), words
    assert "rows cut over 2 ranks" in words


WITHOUT_LOGITS = "every rank computes its part of the loss without the logits of others"
REFUSALS = {
    "compute_loss_func": f"{WITHOUT_LOGITS}: compute_loss_func reads them",
    "compute_metrics": "no rank has the logits of whole ones: leave compute_metrics",
    "loss of TRL": f"{WITHOUT_LOGITS}: loss_type='dft' is a loss of TRL's own",
    "NEFTune": "NEFTune's noise depends on their lengths: leave neftune_noise_alpha out",
    "counts of a rank": "their targets are counted on all ranks: leave average_tokens_across_devices=False out",
    "torch_compile": "their pieces differ in every batch: leave torch_compile out",
    "slow step": "the trainer's own step runs whole ones: leave fast=False out",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_trainers_that_need_whole_documents_are_refused(two: dict[str, Any], name: str) -> None:
    start = re.escape("UnsupportedError: context parallelism (cp_size=2) cuts documents over ranks, and ")
    assert re.match(start + re.escape(REFUSALS[name]), two[f"refuse, {name}"])


def test_predictions_of_logits_are_refused(two: dict[str, Any]) -> None:
    assert re.match(
        r"UnsupportedError: documents are cut over 2 ranks, and no rank has the logits", two["refuse, logits"]
    )


def test_ranks_do_not_choose_levels_of_memory_of_their_own(two: dict[str, Any]) -> None:
    assert re.match(r'UnsupportedError: memory="auto" chooses by the tokens that a rank holds', two["refuse, level"])
