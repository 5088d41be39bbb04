"""Ranks whose rows have no image train with those whose rows have some, as one process does on all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_vision import CASES, train

pytestmark = pytest.mark.slow  # starts processes that train; test_multimodal has blank images in one process


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights, by case."""
    target = tmp_path_factory.mktemp("vision") / "steps.pt"
    torchrun("torchrun_vision.py", str(target), ranks=2)
    found: dict[str, Any] = torch.load(target)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_rank_without_images_trains_with_one_that_has_some(ranks: dict[str, Any], case: str) -> None:
    one, many = train(case, ranks=1, rank=0), ranks[case]
    assert not isinstance(many, str), many  # the text of an error
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert many["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        assert float((many["weights"][name] - weight).abs().max()) <= 1e-6, name
