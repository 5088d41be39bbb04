"""Models whose documents are cut over ranks are copied, saved and resumed as those of one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from packing_core.planning.cost import Cost
from tests.torch_backend.context_parallel.test_context_parallel import all_ranks
from tests.torch_backend.context_parallel.test_context_scored import LORA, built, preferences
from tests.torch_backend.context_parallel.test_context_trainer import CAPACITY, Case, trainer_of
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.wrappers import Wrapper, assert_same_weights, sharded, weights_of
from torch_backend import enable_packing, make_train_step, patch
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.hf.patch import context_of

LENGTHS = ((5, 190, 33, 1, 7, 2), (90, 30, 41))
MOMENTUM = {"optim_args": "momentum=0.9", "save_strategy": "steps", "save_steps": 1}
DROPPED = Case("phi3", changes={"resid_pdrop": 0.2})


def batch(number: int) -> dict[str, Any]:
    return collate(documents(LENGTHS[number]), capacity=None)


def on_mesh(seed: int = 0) -> Any:
    return patch(tiny("qwen3", seed), mesh=all_ranks(), verify=False)


@torch.no_grad()
def loss_of(model: Any) -> float:
    return float(model(**batch(1)).loss)


def copies() -> dict[str, Any]:
    """The losses of a model that has trained a step and of its copies, and which of them cut documents."""
    model = on_mesh()
    wrapped = DistributedDataParallel(model)
    average = AveragedModel(wrapped)
    make_train_step(wrapped, torch.optim.SGD(model.parameters(), 0.1))([batch(0)])
    average.update_parameters(wrapped)
    found = {
        "copy": copy.deepcopy(model),
        "average": average.module.module,
        "loaded": pickle.loads(pickle.dumps(model)),
    }
    return {
        "losses": {"model": loss_of(model), **{name: loss_of(each) for name, each in found.items()}},
        "cut": [name for name, each in found.items() if context_of(each) is not None],
    }


def continued(wrap: Wrapper, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second of two steps, and the same from a distributed checkpoint of the first one."""

    def begun(seed: int) -> Any:
        model = wrap(on_mesh(seed))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return model, optimizer, make_train_step(model, optimizer)

    model, optimizer, step = begun(0)
    step([batch(0)])
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    other, its_optimizer, its_step = begun(1)
    weights, states = get_state_dict(other, its_optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=states)
    return step([batch(1)]), its_step([batch(1)])


def run(trainer: Any, checkpoint: Path | None) -> dict[str, Any]:
    """Trains, and returns what was logged, the weights, and those that were saved last and by name."""
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    folder = Path(trainer.args.output_dir)
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    return {
        "loss": [x["loss"] for x in trainer.state.log_history if "loss" in x],
        "weights": weights_of(trainer.model),
        "saved": [load_file(file) for file in folder.glob("saved/*.safetensors")],
        "files": sorted(file.name for file in folder.glob("saved/*model*")),
    }


def rows(folder: Path, case: Case, checkpoint: Path | None = None) -> dict[str, Any]:
    """Four steps of a Trainer, or those that follow on a checkpoint."""
    trainer = enable_packing(trainer_of(case, str(folder), max_steps=4, **MOMENTUM), capacity=CAPACITY, verify=False)
    return run(trainer, checkpoint)


def pairs(folder: Path, options: dict[str, Any], checkpoint: Path | None = None) -> dict[str, Any]:
    """Four steps of a DPOTrainer, or those that follow on a checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    steps = {"max_steps": 4, "gradient_accumulation_steps": 2}
    return run(enable_packing(built(preferences, str(folder), **steps, **saving, **options), verify=False), checkpoint)


TRAINS: dict[str, Callable[..., dict[str, Any]]] = {
    "Trainer": partial(rows, case=Case()),
    "Trainer, dropout": partial(rows, case=DROPPED),
    "Trainer without cuts": partial(rows, case=Case(groups=2)),
    "DPO, adapters": partial(pairs, options=LORA),
    "DPO": partial(pairs, options={}),
}


def on_rank(name: str, folder: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    return TRAINS[name](folder, checkpoint=checkpoint)


def test_a_copied_model_keeps_its_ranks_and_one_that_is_loaded_has_none() -> None:
    group = ContextGroup(Mock(), "auto", Cost(), contiguous=False)
    assert copy.deepcopy({"context": group})["context"] is group
    assert pickle.loads(pickle.dumps({"context": group})) == {"context": None}


@pytest.mark.slow
def test_copies_have_the_loss_of_the_model() -> None:
    found = on_ranks(copies)
    assert found["losses"] == pytest.approx(dict.fromkeys(found["losses"], found["losses"]["model"]), rel=1e-6)
    assert found["cut"] == ["copy", "average"]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DistributedDataParallel, sharded])
def test_a_step_goes_on_from_a_distributed_checkpoint(wrap: Wrapper, tmp_path: Path) -> None:
    whole, resumed = on_ranks(continued, wrap, tmp_path)
    assert whole == resumed and float(whole["loss"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Trainer, dropout", "DPO, adapters", "DPO"])
def test_a_resumed_run_is_the_whole_one_and_saves_its_weights_once(name: str, tmp_path: Path) -> None:
    whole = on_ranks(on_rank, name, tmp_path / "whole")
    resumed = on_ranks(on_rank, name, tmp_path / "resumed", tmp_path / "whole" / "checkpoint-2")
    assert len(whole["loss"]) == 4 and resumed["loss"] == whole["loss"]
    assert_same_weights(resumed["weights"], whole["weights"], 0.0)
    if "adapters" not in name:
        [saved] = whole["saved"]
        assert whole["files"] == ["model.safetensors"]
        assert saved and all(torch.equal(weight, whole["weights"][key]) for key, weight in saved.items())


@pytest.mark.slow
def test_ranks_that_cut_rows_and_ranks_that_do_not_read_each_others_checkpoints(tmp_path: Path) -> None:
    names = "Trainer", "Trainer without cuts"
    whole = {name: on_ranks(on_rank, name, tmp_path / name) for name in names}
    for begun, goes_on in permutations(names):
        resumed = on_ranks(on_rank, goes_on, tmp_path / f"{goes_on} on", tmp_path / begun / "checkpoint-2")
        assert resumed["loss"] == pytest.approx(whole[goes_on]["loss"], rel=1e-6)
        assert_same_weights(resumed["weights"], whole[goes_on]["weights"])
