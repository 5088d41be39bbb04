"""DeepSpeed's ZeRO-2 and ZeRO-3 on two ranks train the documents as one process does without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_deepspeed import CASES, train

pytest.importorskip("deepspeed", reason="unsupported here: DeepSpeed is no dependency of any extra")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights and losses, by case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    torchrun("torchrun_deepspeed.py", str(folder))
    found: dict[str, Any] = torch.load(folder / "result.pt")
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_deepspeed_train_as_one_process_without_it(
    two_ranks: dict[str, Any], case: str, tmp_path: Path
) -> None:
    one, two = train(CASES[case][1], tmp_path), two_ranks[case]
    assert not isinstance(two, str), two  # the text of an error
    for name, weight in one["model"].items():
        largest = float(weight.abs().max())
        assert float((two["model"][name] - weight).abs().max()) <= 1e-6 * max(largest, 1.0), name
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
