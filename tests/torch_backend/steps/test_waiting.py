"""Steps of a packed trainer do not wait for the GPU, and log what they log when they do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.torch_backend.steps.test_packed_step import assert_same, built, own_loss


class Spoilt:
    """The loss of the trainer, infinite or not a number in some steps; its gradients stay finite."""

    def __init__(self) -> None:
        self.calls = 0
        self.added = {1: float("nan"), 2: float("inf"), 5: float("nan")}

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        self.calls += 1
        return own_loss(outputs, labels, num_items_in_batch) + self.added.get(self.calls, 0.0)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_not_finite_are_logged_as_transformers_does(
    accumulated: int, filtered: bool, tmp_path: Path
) -> None:
    options = {"max_steps": 4, "logging_steps": 2, "gradient_accumulation_steps": accumulated}
    fast, plain = (
        built(tmp_path / str(kind), kind, compute_loss_func=Spoilt(), logging_nan_inf_filter=filtered, **options)
        for kind in (True, False)
    )
    if filtered:
        assert_same(fast, plain)
    else:
        fast.train()
        assert not all(torch.tensor(entry["loss"]).isfinite() for entry in fast.state.log_history if "loss" in entry)
    assert fast.args.logging_nan_inf_filter == filtered


def test_the_loop_does_not_look_at_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    isnan = torch.isnan
    monkeypatch.setattr(transformers.trainer.torch, "isnan", lambda x: asked.append(True) or isnan(x))
    built(tmp_path / "plain", False).train()
    assert asked
    asked.clear()
    built(tmp_path / "fast", True).train()
    assert not asked


@pytest.mark.parametrize("pinned", [True, False])
def test_batches_are_copied_beside_the_step_before(pinned: bool, tmp_path: Path) -> None:
    trainer = built(tmp_path, True, dataloader_pin_memory=pinned, use_cpu=False)
    assert trainer.accelerator.dataloader_config.non_blocking == pinned


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu(tmp_path: Path) -> None:

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:  # compiled and recorded
                torch.cuda.set_sync_debug_mode("warn")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 9:
                torch.cuda.set_sync_debug_mode("default")

    trainer = built(
        tmp_path, True, use_cpu=False, max_steps=10, logging_steps=10, gradient_accumulation_steps=1,
        max_grad_norm=1.0, num_train_epochs=20, callbacks=[Watch()],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    waits = [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]
    assert trainer.packed_step.parts["graph"] == "CUDA graph"
    assert not waits
