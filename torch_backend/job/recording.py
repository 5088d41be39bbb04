"""Records the steps of a ``JobTrainer``, evaluates, and saves checkpoints.

The trainer's events -> a StepRecord of each step, reported by the job -> evaluations and checkpoints when they are due.
The first step of a resumed run begins with the states of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from packing_core.extras import require
from packing_core.training.checkpoints import save_checkpoint
from packing_core.training.records import StepRecord
from torch_backend.hf.anatomy.structure import in_mode
from torch_backend.job import states
from torch_backend.job.trainer import JobTrainer

require("transformers", extra="hf")

from transformers import TrainerCallback  # noqa: E402


class Recording(TrainerCallback):
    """Records the steps of a trainer and saves its checkpoints.

    Args:
        trainer: the trainer; the callback adds itself.
        records: those of the steps before, which is changed.
        checkpoint: the folder to go on from.

    Attributes:
        records: one for each step so far.
    """

    def __init__(self, trainer: JobTrainer, records: list[StepRecord], checkpoint: Path | None) -> None:
        self.trainer = trainer
        self.records = records
        self.checkpoint = checkpoint
        self.begun = False
        self.loss = self.seconds = 0.0
        self.grad_norm: float | None = None
        self.sampled = 0
        self.control: Any = None
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restores the states of the checkpoint, after all that draws random numbers before the first step."""
        if self.begun:
            return
        self.begun = True
        trainer = self.trainer
        if trainer.process.ranks.rank:  # dropout of its own
            torch.manual_seed(hash((trainer.job.options.seed, trainer.process.ranks.rank, trainer.first)))
        if self.checkpoint is not None:
            states.load_states(self.checkpoint, trainer.optimizer, trainer.process.ranks)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.loss, self.seconds = self.trainer.end_step()
        job = self.trainer.job
        self.control = control
        control.should_evaluate = self.trainer.run_name == "packed" and job.evaluates_after(len(self.records))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or "grad_norm" not in logs:
            return
        self.grad_norm = logs["grad_norm"]
        if not control.should_evaluate:
            self._record(None)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **_: Any
    ) -> None:
        assert metrics is not None
        self._record(metrics["eval_loss"])

    def _record(self, eval_loss: float | None) -> None:
        """Records the step, saves a checkpoint if one is due, and ends a run that makes no progress.

        Raises:
            PackingError: a figure of the step is not finite.
        """
        trainer, job, step = self.trainer, self.trainer.job, len(self.records)
        self.records.append(
            job.record(trainer.run_name, step, self.loss, self.seconds, grad_norm=self.grad_norm, eval_loss=eval_loss)
        )
        if eval_loss is not None:
            self._sample()
        if job.stops_after(self.records):
            job.on_phase(f"no lower evaluation loss in {job.early_stopping} evaluations: the run ends here")
            self.control.should_training_stop = True
        if job.saves_after(self.records):
            tensors = states.gathered(trainer.model, trainer.optimizer, trainer.process.ranks)
            if trainer.process.ranks.rank == 0:
                save_checkpoint(job, self.records, lambda folder: states.save(folder, *tensors))

    def _sample(self) -> None:
        """Lets the model continue the prompts of the job, on the first rank."""
        trainer, job = self.trainer, self.trainer.job
        self.sampled = len(self.records)
        if trainer.run_name == "packed" and trainer.process.ranks.rank == 0:
            for number, prompt in enumerate(job.prompts):
                job.on_sample(self.sampled, number, continuation(trainer, prompt))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.sampled < len(self.records):
            self._sample()


@torch.no_grad()
def continuation(trainer: JobTrainer, prompt: Sequence[int]) -> list[int]:
    """Returns the most probable continuation of a prompt, up to the end of text or 64 tokens."""
    model, ids = trainer.model, torch.tensor([prompt], device=trainer.args.device)
    with in_mode(model, training=False), trainer.compute_loss_context_manager():
        generated = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=64,
            do_sample=False,
            use_cache=True,
            pad_token_id=trainer.job.schedule.pad_id,
        )
    return generated[0, len(prompt) :].tolist()
