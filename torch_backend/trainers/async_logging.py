"""Removes the waits for the GPU from every step of transformers' training loop.

Where the loop waits, the GPU runs dry while the host makes the next batch and queues the next step. It waits twice:
for the copy of each batch to the device, which is not asked to go on beside it, and for each loss, which
``logging_nan_inf_filter`` looks at on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback


def without_waiting(trainer: Any) -> LossFilter:
    """Let a trainer queue its steps ahead of the GPU; losses, logs and updates stay what they are."""
    if trainer.args.dataloader_pin_memory:  # copies of other memory wait in any case
        trainer.accelerator.dataloader_config.non_blocking = True
    losses = LossFilter(trainer)
    trainer.add_callback(losses)
    return losses


class LossFilter(TrainerCallback):
    """``logging_nan_inf_filter`` on the device.

    The loop adds each step's loss to a sum for its log. With the filter, it adds the mean of that sum in place of a
    loss that is not finite. Here the loss that is handed to the loop is that mean already, and the argument is False
    for as long as the loop would look at it.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.set_aside = False

    def __call__(self, loss: Tensor) -> Tensor:
        """Returns the value that the loop adds for a step of this loss."""
        trainer = self.trainer
        total = getattr(trainer, "_tr_loss", None)  # a variable of the loop in earlier releases of transformers
        if not trainer.args.logging_nan_inf_filter or total is None or total.device != loss.device:
            return loss
        trainer.args.logging_nan_inf_filter = False
        self.set_aside = True
        mean = total / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean.to(loss.dtype))

    def _restore(self, args: Any) -> None:
        if self.set_aside:
            args.logging_nan_inf_filter, self.set_aside = True, False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._restore(args)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._restore(args)
