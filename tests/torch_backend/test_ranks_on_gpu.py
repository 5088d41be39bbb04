"""Two GPUs and NCCL: ranks of unequal shares, without a target and without a document take the steps of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.models import tiny
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_nccl import CASES, STEPS, held, train
from torch_backend import patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics and weights, by case."""
    target: Path = tmp_path_factory.mktemp("nccl") / "steps.pt"
    torchrun("torchrun_nccl.py", str(target), limit=220)  # both ranks compile the kernels of three models, twice
    found: dict[str, Any] = torch.load(target)
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_take_the_steps_of_one_process(two_gpus: dict[str, Any], case: str) -> None:
    """One process takes the documents of both ranks as two microbatches, on the CPU."""
    both = [[held(step, rank) for rank in range(2)] for step in range(len(STEPS))]
    _, family, fast = CASES[case]
    one, two = train(patch(tiny(family), verify=False), both), two_gpus[case]
    assert not isinstance(two, str), two  # the text of an error
    assert (two["graph"] == "CUDA graph") == fast  # recorded in the third step
    for found, wanted in zip(two["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for name, weight in one["weights"].items():
        assert float((two["weights"][name] - weight).abs().max()) <= 2e-6, name
