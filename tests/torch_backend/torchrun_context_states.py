"""Run by ``torchrun`` in test_context_states: copies and checkpoints of models whose documents are cut; rank 0 writes.

Argument: the file to write to, in whose folder the checkpoints go.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import run_cases, weights_of
from tests.torch_backend.torchrun_context_scored import LORA, built, preferences
from tests.torch_backend.torchrun_context_trainer import CAPACITY, Case, trainer_of
from tests.torch_backend.torchrun_loss import sharded
from torch_backend import enable_packing, make_train_step, patch
from torch_backend.hf.patch import context_of

LENGTHS = ((5, 190, 33, 1, 7, 2), (90, 30, 41))
MOMENTUM = {"optim_args": "momentum=0.9", "save_strategy": "steps", "save_steps": 1}
DROPPED = Case("phi3", changes={"resid_pdrop": 0.2})


def batch(number: int) -> dict[str, Any]:
    return collate(documents(LENGTHS[number]), capacity=None)


def on_mesh(seed: int = 0) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return patch(tiny("qwen3", seed), mesh=mesh, verify=False)


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


def continued(wrap: Callable[[Any], Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
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


def both(train: Callable[..., Any], other: Callable[..., Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs of four steps: a whole one, and one that goes on inside its epoch from the second step of another one."""
    if other is not train:
        other(folder / "other")
    begun = folder / ("whole" if other is train else "other")
    return train(folder / "whole"), train(folder / "resumed", checkpoint=begun / "checkpoint-2")


two, groups = partial(rows, case=Case()), partial(rows, case=Case(groups=2))
dropped = partial(rows, case=DROPPED)
RESUMED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # what goes on, and what was begun
    "Trainer": (two, two),
    "Trainer, dropout": (dropped, dropped),
    "Trainer, begun without cuts": (two, groups),
    "Trainer, goes on without cuts": (groups, two),
    "DPO": (partial(pairs, options={}), partial(pairs, options={})),
    "DPO, adapters": (partial(pairs, options=LORA), partial(pairs, options=LORA)),
}
CASES: dict[str, Callable[[Path], Any]] = {
    "copies": lambda folder: copies(),
    "DDP": partial(continued, DistributedDataParallel),
    "FSDP2": partial(continued, sharded),
    **{name: partial(both, *runs) for name, runs in RESUMED.items()},
}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    run_cases(target, CASES, lambda name: CASES[name](target.parent / name))
