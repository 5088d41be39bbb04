"""A DPO step of a wrapped model: two processes with unequal shares of the pairs have the gradients of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_backend.models import tiny
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_logprobs import CASES, PAIRS, step
from tests.torch_backend.torchrun_loss import CASES as WRAPPERS

pytestmark = pytest.mark.slow  # starts processes that train


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("logprobs") / "gradients.pt"
    torchrun("torchrun_logprobs.py", str(target))
    return torch.load(target)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradients_of_one(two_processes: dict[str, Any], case: str) -> None:
    every = [[pair for rank in PAIRS for microbatch in rank for pair in microbatch]]
    one, two = step(WRAPPERS[case][0](tiny("qwen2")), every), two_processes[case]
    assert not isinstance(two, str), two  # the text of an error
    assert two.keys() == one.keys()
    for name, gradient in one.items():
        assert float((two[name] - gradient).abs().max()) <= 1e-5 * max(float(gradient.abs().max()), 1.0), name
    assert max(float(gradient.abs().max()) for gradient in one.values()) > 1e-3
