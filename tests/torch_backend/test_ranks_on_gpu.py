"""GPUs and NCCL: ranks of unequal shares, without a target and without a document take the steps of one process.

On two GPUs, and on four where they are; by DDP, by FSDP2, and by context parallelism.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.models import tiny
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_nccl import CASES, FAMILIES, STEPS, held, train
from torch_backend import patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


RANKS = (2, 4)


@pytest.fixture(scope="module", params=product(FAMILIES, RANKS), ids=lambda param: f"{param[0]}-{param[1]}")
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, dict[str, Any]]:
    """The family, the number of ranks, and metrics and weights by case."""
    family, ranks = request.param
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    target: Path = tmp_path_factory.mktemp("nccl") / "steps.pt"
    torchrun("torchrun_nccl.py", family, str(target), ranks=ranks, limit=220)  # all ranks compile the kernels
    return family, ranks, torch.load(target)


@pytest.mark.parametrize("case", CASES)
def test_ranks_take_the_steps_of_one_process(steps: tuple[str, int, dict[str, Any]], case: str) -> None:
    """As close to one process in float64 as 1e-5, or as four times what one in float32 is, which steps amplify."""
    family, ranks, found_cases = steps
    found = found_cases[case]
    assert not isinstance(found, str), found  # the text of an error
    strategy, fast, _ = CASES[case]
    if "ranks exchange only" not in found["graph"]:  # what else runs on the machine decides that
        assert (found["graph"] == "CUDA graph") == (fast and strategy != "context")  # recorded in the third step
    truth, one = on_one_process(family, ranks, torch.float64), on_one_process(family, ranks, torch.float32)
    for name in truth["metrics"][0]:
        limit = max(1e-5, 4 * metric_error(one, truth, name))
        assert metric_error(found, truth, name) <= limit, name
    for name in truth["weights"]:
        limit = max(2e-6, 4 * weight_error(one, truth, name))
        assert weight_error(found, truth, name) <= limit, name


@cache
def on_one_process(family: str, ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """The steps on the CPU, whose microbatches are the documents of each rank."""
    every = [[held(step, rank) for rank in range(ranks)] for step in range(len(STEPS))]
    return train(patch(tiny(family).to(dtype), verify=False), every)


def metric_error(found: dict[str, Any], truth: dict[str, Any], name: str) -> float:
    """The largest relative one of all steps."""
    pairs = zip(found["metrics"], truth["metrics"], strict=True)
    return max(abs(step[name] - right[name]) / (abs(right[name]) or 1.0) for step, right in pairs)


def weight_error(found: dict[str, Any], truth: dict[str, Any], name: str) -> float:
    return float((found["weights"][name].double() - truth["weights"][name]).abs().max())
