"""A batch cut over ranks has the loss and the gradients of one process, whichever documents straddle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_backend.test_torchrun import RANKS
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_context import CASES, run

pytestmark = pytest.mark.slow  # starts processes that train


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and gradients, by case."""
    target = tmp_path_factory.mktemp("context") / "results.pt"
    torchrun("torchrun_context.py", str(target), ranks=request.param)
    return torch.load(target)


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(ranks: dict[str, Any], case: str) -> None:
    one, many = run(CASES[case]), ranks[case]
    assert not isinstance(many, str), many  # the text of an error
    assert many["tokens"] < one["tokens"]
    assert abs(many["loss"] - one["loss"]) <= 1e-6 * abs(one["loss"])
    assert many["gradients"].keys() == one["gradients"].keys()
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in one["gradients"].values()))
    for name, gradient in one["gradients"].items():
        assert float((many["gradients"][name] - gradient).abs().max()) <= 1e-6 * largest, name
