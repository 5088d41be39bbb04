"""The job behind ``crosspack train`` on two ranks: what one process computes, resumed either way."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from packing_core.planning.plan import plan
from packing_core.training.job import TrainJob
from packing_core.training.schedule import Schedule
from tests.torch_backend.ranks import DEEPSPEED, everyones, on_ranks
from tests.training_jobs import LLAMA, losses, small_job
from torch_backend.job.models import build_model
from torch_backend.job.ranks import Ranks
from torch_backend.job.states import OPTIMIZER
from torch_backend.job.train import train

pytestmark = pytest.mark.slow  # starts processes that train

BFLOAT16 = 2 * torch.finfo(torch.bfloat16).eps


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
CUT = "fsdp, documents cut"  # begun and finished by two ranks
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


def figures(result: Any) -> dict[str, Any]:
    evaluated = [record.eval_loss for record in result.records["packed"] if record.eval_loss is not None]
    norms = [record.grad_norm for record in result.records["packed"]]
    return {"losses": losses(result), "evaluations": evaluated, "norms": norms}


def on_rank(name: str, folder: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    """The figures of a run, by rank."""
    if name in ZERO:
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile first; gloo does the same
    run = dataclasses.replace(job(name, folder / "start", output), **changes)
    with suppress(Stop):
        return everyones(figures(train(run)))
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the model that runs start from, and what two ranks have trained of it, by case."""
    folder = tmp_path_factory.mktemp("job")
    build_model(small_job(LAYER)).save_pretrained(folder / "start")
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The figures of two ranks, by case and rank."""
    return {name: on_ranks(on_rank, name, folder, folder / "two" / name) for name in CASES}


def assert_same_tensors(found: Path, wanted: Path, tolerance: float) -> None:
    """The files hold the same names, and values that differ by no more than the tolerance of the largest."""
    one, two = load_file(found), load_file(wanted)
    names = {name for name in two if not name.startswith("random.")}
    assert names == {name for name in one if not name.startswith("random.")}
    for name in names:
        largest = max(float(two[name].float().abs().max()), 1.0)
        assert float((one[name].float() - two[name].float()).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(folder: Path, two: Any, name: str, tmp_path: Path) -> None:
    wanted, tolerance = figures(train(job(name, folder / "start", tmp_path))), BFLOAT16 if "master" in name else 1e-6
    for found in two[name]:
        assert len(found["evaluations"]) == 2
        assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=max(tolerance, 1e-5))
        assert found["evaluations"] == pytest.approx(wanted["evaluations"], rel=tolerance)
    model = "adapter_model.safetensors" if "LoRA" in name else "model.safetensors"
    assert_same_tensors(folder / "two" / name / model, tmp_path / model, tolerance)
    (mine,), (theirs,) = ((f / "checkpoints").glob(f"*/{OPTIMIZER}") for f in (tmp_path, folder / "two" / name))
    assert_same_tensors(theirs, mine, tolerance)


@pytest.mark.parametrize("name", [pytest.param(name, marks=DEEPSPEED) for name in ZERO])
def test_two_ranks_of_deepspeed_train_as_one_process_does(folder: Path, name: str, tmp_path: Path) -> None:
    """AdamW divides gradients by their size, so what ZeRO-3 rounds otherwise in small ones shows in weights.

    Those of bfloat16 are rounded before two ranks add them, so single weights move elsewhere and only losses compare.
    """
    wanted, tolerance = figures(train(job(name, folder / "start", tmp_path))), BFLOAT16 if "master" in name else 1e-5
    for found in on_ranks(on_rank, name, folder, folder / "two" / name, own=True):
        assert len(found["evaluations"]) == 2
        for figure in ("losses", "evaluations", "norms"):
            assert found[figure] == pytest.approx(wanted[figure], rel=tolerance)
    if "master" not in name:
        model = "adapter_model.safetensors" if "LoRA" in name else "model.safetensors"
        assert_same_tensors(folder / "two" / name / model, tmp_path / model, tolerance)


def test_one_process_begins_and_two_ranks_go_on(folder: Path, tmp_path: Path) -> None:
    whole, begun = (job(RESUMED, folder / "start", tmp_path / output) for output in ("whole", "begun"))
    with pytest.raises(Stop):
        train(dataclasses.replace(begun, on_step=stop))
    wanted = figures(train(whole))["losses"]
    for resumed in on_ranks(on_rank, RESUMED, folder, tmp_path / "begun", resume=True):
        assert resumed["losses"] == pytest.approx(wanted, rel=1e-6)


def test_ranks_that_cut_documents_go_on_from_a_checkpoint(folder: Path, two: Any, tmp_path: Path) -> None:
    assert on_ranks(on_rank, CUT, folder, tmp_path, on_step=stop) == []
    assert on_ranks(on_rank, CUT, folder, tmp_path, resume=True) == two[CUT]
    assert_same_tensors(*(run / "model.safetensors" for run in (folder / "two" / CUT, tmp_path)), 0.0)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_begin_and_one_process_goes_on(folder: Path, two: Any, name: str) -> None:
    begun = job(name, folder / "start", folder / "two" / name)
    resumed = figures(train(dataclasses.replace(begun, resume=True)))["losses"]
    assert resumed == pytest.approx(two[name][0]["losses"], rel=1e-6)
    assert resumed[:4] == two[name][0]["losses"][:4]  # which are read, and the last one computed again


def test_rows_of_a_step_are_dealt_once_and_evenly(tmp_path: Path) -> None:
    schedule = job("ddp", tmp_path, None).schedule
    for step in range(len(schedule)):
        for world in (2, 3, 4):
            dealt = [list(schedule.packed(step, rank=rank, ranks=world)) for rank in range(world)]
            assert len({len(rows) for rows in dealt}) == 1
            held = sorted(ids.tolist() for rows in dealt for row in rows for ids in row.unpack().values())
            assert held == sorted(ids.tolist() for row in schedule.packed(step) for ids in row.unpack().values())
            assert all(len(row.input_ids) == 1 for rows in dealt for row in rows)
