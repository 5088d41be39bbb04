"""``use_liger_kernel=True``: Liger's norms, rotary embedding, MLP and losses inside packed trainers, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama import modeling_llama

from tests.torch_backend.steps import test_packed_step, test_sft_step
from tests.torch_backend.steps.test_packed_step import trained
from tests.torch_backend.trainers.test_trainer import differences, llama

pytest.importorskip("liger_kernel", reason="unsupported here: liger-kernel is no dependency of any extra")
pytestmark = pytest.mark.gpu

TRAINERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Trainer": (test_packed_step.built, {}),
    "SFTTrainer": (test_sft_step.built, {}),
    "SFTTrainer, TRL's packing": (test_sft_step.built, test_sft_step.TRL_PACKS),
}
TOLERANCE = 1e-4  # of the audit in float32


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    """Liger replaces functions of the modeling file as well as parts of the model."""
    before = dict(vars(modeling_llama))
    yield
    vars(modeling_llama).update(before)


@pytest.mark.parametrize("name", TRAINERS)
def test_losses_and_updates_are_those_without_liger(name: str, tmp_path: Path) -> None:
    """The trainer with the plain step and stock layers is right; it was built and run before Liger came."""
    build, options = TRAINERS[name]
    right = build(tmp_path / "right", False, **options)
    wanted = trained(right)
    for fast in (False, True):
        trainer = build(tmp_path / str(fast), fast, use_cpu=False, use_liger_kernel=True, **options)
        for found, known in zip(trained(trainer), wanted, strict=True):
            assert found == pytest.approx(known, rel=10 * TOLERANCE, abs=TOLERANCE)
        assert differences(trainer.model.cpu(), right.model) < TOLERANCE
        assert trainer.model.model.norm.forward.__func__.__module__.startswith("liger_kernel.")
    assert differences(right.model, llama()) > 10 * TOLERANCE
    assert "by plain operations in place of Liger's kernels" in trainer.packed_step.parts["layers"]
    assert trainer.packed_step.parts["graph"] == "CUDA graph"
