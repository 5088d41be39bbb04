"""Two GPUs and NCCL: ranks of unequal shares, without a target and without a document take the steps of one process."""

from __future__ import annotations

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


@pytest.fixture(scope="module", params=FAMILIES)
def two_gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The family, and metrics and weights by case."""
    target: Path = tmp_path_factory.mktemp("nccl") / "steps.pt"
    torchrun("torchrun_nccl.py", request.param, str(target), limit=220)  # both ranks compile the kernels
    return request.param, torch.load(target)


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_take_the_steps_of_one_process(two_gpus: tuple[str, dict[str, Any]], case: str) -> None:
    """One process takes the documents of both ranks as two microbatches, on the CPU."""
    family, found_cases = two_gpus
    both = [[held(step, rank) for rank in range(2)] for step in range(len(STEPS))]
    one, two = train(patch(tiny(family), verify=False), both), found_cases[case]
    assert not isinstance(two, str), two  # the text of an error
    assert (two["graph"] == "CUDA graph") == CASES[case][1]  # recorded in the third step
    for found, wanted in zip(two["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for name, weight in one["weights"].items():
        assert float((two["weights"][name] - weight).abs().max()) <= 2e-6, name
