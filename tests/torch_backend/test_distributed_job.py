"""The job behind ``crosspack train`` on two ranks: what one process computes, resumed either way."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_job import CASES, CUT, LAYER, RESUMED, ZERO, Stop, found, job, stop
from tests.training_jobs import small_job
from torch_backend.job.models import build_model
from torch_backend.job.states import OPTIMIZER
from torch_backend.job.train import train

pytestmark = pytest.mark.slow  # starts processes that train

BFLOAT16 = 2 * torch.finfo(torch.bfloat16).eps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two ranks, and of a run that one process began for them."""
    folder = tmp_path_factory.mktemp("job")
    build_model(small_job(LAYER)).save_pretrained(folder / "start")
    begun = dataclasses.replace(job(RESUMED, folder / "start", folder / "begun by one"), on_step=stop)
    with pytest.raises(Stop):
        train(begun)
    torchrun("torchrun_job.py", str(folder), "all")
    return folder


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two ranks under DeepSpeed."""
    folder = tmp_path_factory.mktemp("zero")
    build_model(small_job(LAYER)).save_pretrained(folder / "start")
    torchrun("torchrun_job.py", str(folder), "zero")
    return folder


def ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text())[name] for rank in range(2)]


def assert_same_tensors(found: Path, wanted: Path, tolerance: float) -> None:
    """The files hold the same names, and values that differ by no more than the tolerance of the largest."""
    one, two = load_file(found), load_file(wanted)
    names = {name for name in two if not name.startswith("random.")}
    assert names == {name for name in one if not name.startswith("random.")}
    for name in names:
        largest = max(float(two[name].float().abs().max()), 1.0)
        assert float((one[name].float() - two[name].float()).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(folder: Path, name: str, tmp_path: Path) -> None:
    wanted, tolerance = found(train(job(name, folder / "start", tmp_path))), BFLOAT16 if "master" in name else 1e-6
    for two in ranks(folder, name):
        assert len(two["evaluations"]) == 2
        assert two["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
        assert two["norms"] == pytest.approx(wanted["norms"], rel=max(tolerance, 1e-5))
        assert two["evaluations"] == pytest.approx(wanted["evaluations"], rel=tolerance)
    model = "adapter_model.safetensors" if "LoRA" in name else "model.safetensors"
    assert_same_tensors(folder / "two" / name / model, tmp_path / model, tolerance)
    (mine,), (theirs,) = ((f / "checkpoints").glob(f"*/{OPTIMIZER}") for f in (tmp_path, folder / "two" / name))
    assert_same_tensors(theirs, mine, tolerance)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="unsupported here: DeepSpeed is no dependency of any extra")
@pytest.mark.parametrize("name", ZERO)
def test_two_ranks_of_deepspeed_train_as_one_process_does(zero: Path, name: str, tmp_path: Path) -> None:
    """AdamW divides gradients by their size, so what ZeRO-3 rounds otherwise in small ones shows in weights.

    Those of bfloat16 are rounded before two ranks add them, so single weights move elsewhere and only losses compare.
    """
    wanted, tolerance = found(train(job(name, zero / "start", tmp_path))), BFLOAT16 if "master" in name else 1e-5
    for two in ranks(zero, name):
        assert len(two["evaluations"]) == 2
        for figures in ("losses", "evaluations", "norms"):
            assert two[figures] == pytest.approx(wanted[figures], rel=tolerance)
    if "master" not in name:
        model = "adapter_model.safetensors" if "LoRA" in name else "model.safetensors"
        assert_same_tensors(zero / "two" / name / model, tmp_path / model, tolerance)


def test_one_process_begins_and_two_ranks_go_on(folder: Path, tmp_path: Path) -> None:
    wanted = found(train(job(RESUMED, folder / "start", tmp_path)))
    for resumed in ranks(folder, "resumed"):
        assert resumed["losses"] == pytest.approx(wanted["losses"], rel=1e-6)


def test_ranks_that_cut_documents_go_on_from_a_checkpoint(folder: Path) -> None:
    for whole, resumed in zip(ranks(folder, CUT), ranks(folder, "resumed, documents cut"), strict=True):
        assert resumed == whole
    assert_same_tensors(*(folder / run / "model.safetensors" for run in (f"two/{CUT}", "begun by two")), 0.0)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_begin_and_one_process_goes_on(folder: Path, name: str) -> None:
    two = job(name, folder / "start", folder / "two" / name)
    extended = dataclasses.replace(two, options=two.options, resume=True)
    resumed = found(train(extended))["losses"]
    assert resumed == pytest.approx(ranks(folder, name)[0]["losses"], rel=1e-6)
    assert resumed[:4] == ranks(folder, name)[0]["losses"][:4]  # which are read, and the last one computed again


def test_rows_of_a_step_are_dealt_once_and_evenly(tmp_path: Path) -> None:
    schedule = job("ddp", tmp_path, None).schedule
    for step in range(len(schedule)):
        for world in (2, 3, 4):
            dealt = [list(schedule.packed(step, rank=rank, ranks=world)) for rank in range(world)]
            assert len({len(rows) for rows in dealt}) == 1
            held = sorted(ids.tolist() for rows in dealt for row in rows for ids in row.unpack().values())
            assert held == sorted(ids.tolist() for row in schedule.packed(step) for ids in row.unpack().values())
            assert all(len(row.input_ids) == 1 for rows in dealt for row in rows)
