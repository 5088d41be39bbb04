"""The ``Trainer`` of a job: transformers' loop over the steps of a Schedule, packed by ``enable_packing``.

A patched or unpatched model and a job -> :func:`job_trainer` -> ``trainer.train()``, which reports a StepRecord of each
step, and evaluates and saves checkpoints when they are due. A batch of the dataloader is one rank's share of a step, a
list of microbatches (:class:`RowByRow`). The loss is the mean over the trained tokens of all of them on all ranks, so
nothing depends on how a step's documents were arranged.

Two parts are not the Trainer's own. Checkpoints are those of ``packing_core.training.checkpoints``: one format for any
number of ranks, safetensors alone, written whole or not at all. A Trainer's hold pickles, and those of FSDP2 cannot be
read without it. And FSDP2 shards by ``fully_shard`` before the Trainer is built, because accelerate offers it on
accelerators alone and cannot follow an optimizer whose parameters are float32 copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.extras import require
from packing_core.planning.cost import cost_of
from packing_core.training.checkpoints import save_checkpoint
from packing_core.training.job import ZERO, TrainJob
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Run, Schedule
from torch_backend.collate import Batch, PackedCollator
from torch_backend.collate.model_traits import configs_of
from torch_backend.hf.anatomy.structure import in_mode
from torch_backend.job import states
from torch_backend.job.models import shared_arguments
from torch_backend.job.ranks import Process
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy
from torch_backend.ops.divisor import Divisor, quotient
from torch_backend.segments import to_device
from torch_backend.steps.fixed_shapes import FixedShapes
from torch_backend.steps.train_step import accumulating, wrappers_of
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.enable_packing import enable_packing
from torch_backend.trainers.fast_step import PackedStep
from torch_backend.trainers.own_loss import TrainerLoss

require("transformers", extra="hf")

from transformers import PrinterCallback, Trainer, TrainingArguments  # noqa: E402


class StepShares(Dataset[Any]):
    """Item n is a rank's share of step ``first + n``."""

    def __init__(self, schedule: Schedule, first: int, share: Callable[[int], Any]) -> None:
        self.steps = range(first, len(schedule))
        self.share = share

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> Any:
        return self.share(self.steps[number])  # an IndexError ends a loop over the items


class RowByRow(PackedCollator):
    """Collates an item of packed rows to a list of batches, one for each row."""

    def __call__(self, features: Any) -> Any:
        """Returns the batches of the only item."""
        (rows,) = features
        return [super(RowByRow, self).__call__(row) for row in rows.single_rows()]


def padded_batches(schedule: Schedule, step: int, run: Run) -> Iterator[Batch]:
    """Yields the padded batches of a step.

    Each has ``input_ids``, ``attention_mask`` and ``labels`` int64 [B, S]; labels are unshifted, and -100 where nothing
    is trained.
    """
    for padded in schedule.padded(step, run):
        arrays = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "labels": padded.targets}
        yield {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


@dataclass
class JobArguments(TrainingArguments):
    """Arguments of a process that trains on one device; TrainingArguments would take all GPUs that it sees.

    Attributes:
        place: the device.
    """

    place: str = "cpu"

    @property
    def device(self) -> torch.device:
        super().device  # noqa: B018  (it sets accelerate up)
        return torch.device(self.place)

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


class JobTrainer(Trainer):
    """Trains one run of a job; made by :func:`job_trainer`.

    Args:
        job: the job.
        run: which run.
        model: on its device, sharded if it shall be.
        process: where the model is.
        records: of the steps so far, to which those of this trainer are added.
        checkpoint: the folder to go on from, whose weights the model has; None begins anew.
        folder: for whatever Trainer writes, which is nothing that is kept.
    """

    model: Any  # never None here, other than Trainer's types say
    optimizer: Any
    train_dataset: Any

    def __init__(
        self,
        job: TrainJob,
        run: Run,
        model: Any,
        process: Process,
        *,
        records: list[StepRecord],
        checkpoint: Path | None,
        folder: str,
    ) -> None:
        self.job = job
        self.run_name: Run = run
        self.process = process
        self.groups = process.ranks.groups(job.context_parallel)  # which train on different rows
        self.records, self.checkpoint = records, checkpoint
        self.first = first = len(records)
        self.step_loss = torch.zeros(())  # of the last step on this rank, times the number of ranks
        self.sampled = 0  # steps after which the prompts were continued last
        self._timed = ExitStack()
        args = _arguments(job, steps=len(job.schedule) - first, device=process.device, folder=folder)
        if run == "packed":
            rank, ranks, cost = self.groups.rank, self.groups.world, cost_of(configs_of(model))
            share: Callable[[int], Any] = partial(job.schedule.rows, rank=rank, ranks=ranks, cost=cost)
            collator: Callable[[Any], Any] = RowByRow(model)
        else:
            share, collator = partial(padded_batches, job.schedule, run=run), itemgetter(0)  # collated already
        super().__init__(model, args, collator, StepShares(job.schedule, first, share))
        if not (
            self.model_accepts_loss_kwargs or job.context_parallel > 1
        ):  # its own loss would be a mean over each microbatch
            self.compute_loss_func = _mean_over_step
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns a loader of this rank's steps. accelerate would deal them again, and pin each number of a batch."""
        return DataLoader(self.train_dataset, collate_fn=self.data_collator)

    def get_cp_size(self) -> int:
        """Returns the number of ranks that get the same rows, by which the Trainer divides its count of targets."""
        return self.job.context_parallel

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            copies = self.job.options.master_weights and self.job.strategy not in ZERO  # which makes them itself
            options, named = self.job.options, partial(self.get_optimizer_cls_and_kwargs, self.args)
            chosen = None if options.optim is None and not options.settings else named
            self.optimizer = states.make_optimizer(self.model, options, master_weights=copies, named=chosen)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer, lambda step: self.job.learning_rate(self.first + step)
            )
        return self.lr_scheduler

    def compute_loss_context_manager(self) -> ExitStack:
        """Adds autocast to the Trainer's own. ``bf16=True`` would convert outputs, and shards under FSDP2, too."""
        stack = super().compute_loss_context_manager()
        options = self.job.options
        if options.dtype == "float32" and options.precision != "float32":
            stack.enter_context(torch.autocast(self.args.device.type, torch.bfloat16))
        return stack

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the microbatches of the next step as one batch, and the number of their targets on all ranks."""
        if not self.state.global_step:
            self._restore()
        self._timed.enter_context(self.process.clock.timed())
        microbatches = [_on_device(batch, self.args.device) for batch in next(epoch_iterator)]
        return [microbatches], self._get_num_items_in_batch(microbatches, device)

    def _restore(self) -> None:
        """Restores the states of the checkpoint, after all that draws random numbers before the first step."""
        if self.process.ranks.rank:  # dropout of its own
            torch.manual_seed(hash((self.job.options.seed, self.process.ranks.rank, self.first)))
        if self.checkpoint is not None:
            states.load_states(self.checkpoint, self.optimizer, self.process.ranks)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *_: Any, **__: Any) -> None:
        """Records a step, saves a checkpoint if one is due, and ends a run that makes no progress.

        Raises:
            PackingError: a figure of the step is not finite.
        """
        job, step = self.job, len(self.records)
        if step == self.first + self.state.global_step:  # at the end of an epoch, whose last step is recorded
            return
        loss = float(Divisor().average(self.step_loss))
        self._timed.close()
        norm, seconds = None if grad_norm is None else float(grad_norm), self.process.clock.seconds
        evaluates = self.run_name == "packed" and job.evaluates_after(step)
        evaluated = self.evaluation_loss() if evaluates else None
        self.records.append(job.record(self.run_name, step, loss, seconds, grad_norm=norm, eval_loss=evaluated))
        if evaluates:
            self.sample()
        if job.stops_after(self.records):
            job.on_phase(f"no lower evaluation loss in {job.early_stopping} evaluations: the run ends here")
            self.control.should_training_stop = True
        if job.saves_after(self.records):
            tensors = states.gathered(self.model, self.optimizer, self.process.ranks)
            if self.process.ranks.rank == 0:
                save_checkpoint(job, self.records, lambda folder: states.save(folder, *tensors))

    @torch.no_grad()
    def evaluation_loss(self) -> float:
        """Returns the mean loss over all targets of the job's held-out documents, on all ranks."""
        job, collate = self.job, PackedCollator(self.model)
        assert job.evaluation is not None
        model, groups, one = self.model_wrapped, self.groups, torch.ones((), device=self.args.device)
        world = self.process.ranks.world
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with in_mode(model, training=False):
            for step in range(len(job.evaluation)):
                for row in job.evaluation.packed(step, rank=groups.rank, ranks=groups.world):
                    batch = _on_device(collate(row), self.args.device)
                    with self.compute_loss_context_manager():
                        loss: Any = self.compute_loss(model, dict(batch), num_items_in_batch=one)
                    targets = (batch["labels"] != IGNORE_INDEX).sum().double() / job.context_parallel
                    sums += torch.stack([loss.double() / world, targets])
        return float(quotient(*Divisor().total(sums)))

    def sample(self) -> None:
        """Lets the model continue the prompts of the job, on the first rank, once after a step."""
        steps = len(self.records)
        if self.run_name == "packed" and self.process.ranks.rank == 0 and self.sampled < steps:
            for number, prompt in enumerate(self.job.prompts):
                self.job.on_sample(steps, number, self._continuation(prompt))
        self.sampled = steps

    @torch.no_grad()
    def _continuation(self, prompt: Sequence[int]) -> list[int]:
        """Returns the most probable continuation of a prompt, up to the end of text or 64 tokens."""
        model, ids = self.model, torch.tensor([prompt], device=self.args.device)
        with in_mode(model, training=False), self.compute_loss_context_manager():
            generated = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=64,
                do_sample=False,
                use_cache=True,
                pad_token_id=self.job.schedule.pad_id,
            )
        return generated[0, len(prompt) :].tolist()

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: nobody reads the count."""
        return 0


def job_trainer(job: TrainJob, run: Run, model: Any, process: Process, **others: Any) -> JobTrainer:
    """Builds the trainer of a run; the packed one is patched. Arguments are those of :class:`JobTrainer`."""
    trainer = JobTrainer(job, run, model, process, **others)
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)  # TrainingArguments set the first one
    if run == "packed":
        precision: Any = "float8" if job.options.precision == "float8" else None
        enable_packing(trainer, implementation=job.attention, verify=False, precision=precision)
    else:
        trainer.packed_step = PackedStep(Changes(trainer), TrainerLoss(trainer))  # type: ignore[attr-defined]
    # Runs that are compared differ in their rows alone: none is compiled or captured.
    fast = False if len(job.runs) > 1 or job.deterministic else "auto"
    step: Any = trainer.packed_step  # type: ignore[attr-defined]
    step.compile, step.capture = fast if job.compile is None else job.compile, fast
    step.fixed = FixedShapes.of_plans(job.schedule.plans)
    trainer.training_step = partial(_over_microbatches, trainer, trainer.training_step)  # type: ignore[method-assign]
    if job.strategy == "fsdp":  # accelerate would wrap it in DDP
        trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
    return trainer


def _arguments(job: TrainJob, *, steps: int, device: torch.device, folder: str) -> JobArguments:
    zero = job.strategy in ZERO
    return JobArguments(
        output_dir=folder,
        place=str(device),
        use_cpu=device.type == "cpu",
        deepspeed=_zero(job) if zero else None,
        bf16=zero and job.options.dtype == "bfloat16",
        max_steps=steps,
        per_device_train_batch_size=1,
        average_tokens_across_devices=True,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        learning_rate=1.0,  # which the schedule multiplies
        optim=job.options.optim or "adamw_torch_fused",
        **shared_arguments(job.options),
        **(job.options.settings or {}),
    )


def _zero(job: TrainJob) -> dict[str, Any]:
    """Returns DeepSpeed's configuration."""
    return {
        "zero_optimization": {"stage": int(job.strategy.removeprefix("zero"))},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def _over_microbatches(
    trainer: JobTrainer,
    training_step: Callable[..., Tensor],
    model: nn.Module,
    microbatches: list[Batch],
    num_items_in_batch: Any = None,
) -> Tensor:
    """As ``Trainer.training_step``, for a step's microbatches; ranks reduce their gradients after the last one."""
    wrappers = wrappers_of(model)
    loss = torch.zeros((), device=trainer.args.device)
    state = trainer.accelerator.gradient_state  # of the whole process, also after an error
    try:
        for number, batch in enumerate(microbatches):
            last = number == len(microbatches) - 1
            state._set_sync_gradients(last)
            with accumulating(wrappers, last=last):
                loss += training_step(model, batch, num_items_in_batch)
    finally:
        state._set_sync_gradients(True)
    trainer.step_loss = loss
    return loss


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return {name: to_device(x, device) if isinstance(x, Tensor) else x for name, x in batch.items()}


def _mean_over_step(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Computes the loss from logits, for models whose own loss does not take the number of the step's targets."""
    total, _ = packed_cross_entropy(outputs.logits, next_token_targets(labels))
    return total / num_items_in_batch
