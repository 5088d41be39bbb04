"""``causal_lm_loss`` of a wrapped model: two processes have the gradients of one, in the first step and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_backend.models import tiny
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_loss import CASES, train

pytestmark = pytest.mark.slow  # starts processes that train


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The gradients of each step, by case."""
    target = tmp_path_factory.mktemp("loss") / "gradients.pt"
    torchrun("torchrun_loss.py", str(target))
    return torch.load(target)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradients_of_one(two_processes: dict[str, Any], case: str) -> None:
    one, two = list(train(CASES[case][0](tiny("qwen2")), shares=1, share=0)), two_processes[case]
    assert not isinstance(two, str), two  # the text of an error
    for step, (wanted, found) in enumerate(zip(one, two, strict=True)):
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            largest = float(gradient.abs().max())
            assert float((found[name] - gradient).abs().max()) <= 1e-6 * max(largest, 1.0), (step, name)
            assert largest > 0 or name.endswith("k_proj.bias"), name  # which no attention depends on
