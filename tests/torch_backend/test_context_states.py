"""Models whose documents are cut over ranks are copied, saved and resumed as those of one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from packing_core.planning.cost import Cost
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_context_states import RESUMED
from torch_backend.context_parallel.group import ContextGroup


def test_a_copied_model_keeps_its_ranks_and_one_that_is_loaded_has_none() -> None:
    group = ContextGroup(Mock(), "auto", Cost(), contiguous=False)
    assert copy.deepcopy({"context": group})["context"] is group
    assert pickle.loads(pickle.dumps({"context": group})) == {"context": None}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two ranks, by case."""
    target = tmp_path_factory.mktemp("context") / "results.pt"
    torchrun("torchrun_context_states.py", str(target))
    found: dict[str, Any] = torch.load(target)
    return found


@pytest.mark.slow
def test_copies_have_the_loss_of_the_model(two: dict[str, Any]) -> None:
    found = two["copies"]
    assert not isinstance(found, str), found  # the text of an error
    assert found["losses"] == pytest.approx(dict.fromkeys(found["losses"], found["losses"]["model"]), rel=1e-6)
    assert found["cut"] == ["copy", "average"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_a_step_goes_on_from_a_distributed_checkpoint(two: dict[str, Any], name: str) -> None:
    assert not isinstance(two[name], str), two[name]
    whole, resumed = two[name]
    assert whole == resumed and float(whole["loss"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_whole_one(two: dict[str, Any], name: str) -> None:
    assert not isinstance(two[name], str), two[name]
    whole, resumed = two[name]
    train, begun = RESUMED[name]
    assert len(whole["loss"]) == 4
    if train is begun:
        assert resumed["loss"] == whole["loss"]
    else:
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    for key, weight in whole["weights"].items():
        exact = 0.0 if train is begun else 1e-6
        assert float((resumed["weights"][key] - weight).abs().max()) <= exact, key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Trainer", "DPO"])
def test_saved_weights_are_those_of_the_model_written_once(two: dict[str, Any], name: str) -> None:
    whole, _ = two[name]
    [saved] = whole["saved"]
    assert whole["files"] == ["model.safetensors"]
    assert saved and all(torch.equal(weight, whole["weights"][key]) for key, weight in saved.items())
