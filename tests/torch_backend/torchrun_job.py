"""Run by ``torchrun`` in test_distributed_job: the jobs of CASES; every rank writes its losses to the folder given."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from packing_core.planning.plan import plan
from packing_core.training.job import TrainJob
from packing_core.training.schedule import Schedule
from tests.torch_backend.torchrun import leave
from tests.training_jobs import LLAMA, losses, small_job
from torch_backend.job.ranks import Ranks
from torch_backend.job.train import train

LAYER = {**LLAMA, "num_hidden_layers": 1}
HALF = {"dtype": "bfloat16", "precision": "bfloat16", "master_weights": True}
# Ranks of a document round sums otherwise than one process, by 1e-6 of a gradient. AdamW divides gradients by their
# size, so of the smallest that shows in weights, by the learning rate times as much.
CUT_OPTIONS: dict[str, Any] = {"lr": 1e-3}
# name -> strategy, options
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "ddp, LoRA": ("ddp", {"lora": 2}),
    "fsdp, master weights": ("fsdp", HALF),
    "ddp, documents cut": ("ddp", CUT_OPTIONS),
    "fsdp, documents cut": ("fsdp", CUT_OPTIONS),
}
# what DeepSpeed serves, where it is installed; it writes no checkpoints
ZERO: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "zero2, LoRA": ("zero2", {"lora": 2}),
    "zero3, master weights": ("zero3", HALF),
}
RESUMED = "fsdp"  # begun by one process, finished by two
CUT = "fsdp, documents cut"  # begun and finished by two
STEPS = 5


def job(name: str, start: Path, output: Path | None) -> TrainJob:
    """Five steps of three rows, which two ranks cannot share evenly, and two evaluations."""
    strategy, options = (CASES | ZERO)[name]
    world = Ranks.from_environment().world
    made = small_job(
        str(start),
        output=output,
        save_every=0 if name in ZERO else 2,
        strategy=strategy,
        context_parallel=world if "documents cut" in name else 1,
    )
    corpus = made.schedule.corpus
    rows = plan(corpus.documents.lengths, 40, seed=9)
    return dataclasses.replace(
        made,
        schedule=dataclasses.replace(made.schedule, rows_per_step=3, limit=STEPS),
        evaluation=Schedule(corpus, (rows,), rows_per_step=world),
        eval_every=4,
        options=dataclasses.replace(made.options, **options),
    )


class Stop(Exception):
    """Ends a run as if it were killed."""


def stop(record: Any) -> None:
    if record.step == 3:
        raise Stop


def found(result: Any) -> dict[str, Any]:
    evaluated = [record.eval_loss for record in result.records["packed"] if record.eval_loss is not None]
    norms = [record.grad_norm for record in result.records["packed"]]
    return {"losses": losses(result), "evaluations": evaluated, "norms": norms}


def main(folder: Path, cases: str) -> None:
    dist.init_process_group("gloo")
    results = {}
    if cases == "zero":
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile first; gloo does the same
    for name in ZERO if cases == "zero" else CASES:
        results[name] = found(train(job(name, folder / "start", folder / "two" / name)))
    if cases != "zero":
        begun = job(RESUMED, folder / "start", folder / "begun by one")
        results["resumed"] = found(train(dataclasses.replace(begun, resume=True)))
        begun = job(CUT, folder / "start", folder / "begun by two")
        with suppress(Stop):
            train(dataclasses.replace(begun, on_step=stop))
        results["resumed, documents cut"] = found(train(dataclasses.replace(begun, resume=True)))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave()
