"""Preferences, policies and classifiers on two ranks: the update is that of every document alone in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.preference import one_document_per_call
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_post_training import TRAINERS, build

pytestmark = pytest.mark.slow  # starts processes that train

# As many pairs or completions in one process, in a single micro-batch.
WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights and loss after a step on two ranks, by trainer."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun("torchrun_post_training.py", str(folder))
    found: dict[str, Any] = torch.load(folder / "result.pt")
    return found


@pytest.mark.parametrize("name", TRAINERS)
def test_two_ranks_train_as_every_document_alone(ranks: dict[str, Any], name: str, tmp_path: Path) -> None:
    trainer = build(name, tmp_path, **(WHOLE if name.isupper() else {}))
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None and name.isupper():
            one_document_per_call(model)
    before = {key: x.clone() for key, x in trainer.model.state_dict().items()}
    trainer.train()
    # The loss of RLOO is 0 before the first update, whose advantages cancel.
    assert ranks[name]["loss"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5, abs=1e-6)
    for key, weight in trainer.model.state_dict().items():
        difference = (ranks[name]["model"][key] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
        assert difference <= 1e-5, f"{key}: {difference:.1e}"
    assert any(not torch.equal(weight, before[key]) for key, weight in trainer.model.state_dict().items())
