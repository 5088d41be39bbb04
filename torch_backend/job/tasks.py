"""The torch trainers behind ``crosspack train --task``: a TaskJob goes in, a TaskResult comes out.

The job -> its kind (:mod:`.kinds`, :mod:`.retrieval`): a model, data sets and the task's own trainer -> packing and an
audit -> ``train()`` -> the model, written unpatched. The loop, the loss and the checkpoints are the trainer's own.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.tasks import TaskJob, TaskName, TaskResult
from torch_backend.job import kinds
from torch_backend.job.models import audit_of
from torch_backend.job.retrieval import Embeddings, LateInteraction, Reranking
from torch_backend.job.train import device_name

require("transformers", extra="hf")

from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

KINDS: dict[TaskName, type[kinds.TaskKind]] = {
    "sft": kinds.ImageDocuments,
    "dpo": kinds.Answers,
    "kto": kinds.Answers,
    "reward": kinds.RewardModel,
    "grpo": kinds.Answers,
    "classify": kinds.Classes,
    "mlm": kinds.MaskedTokens,
    "embed": Embeddings,
    "late": LateInteraction,
    "rerank": Reranking,
}


def train(job: TaskJob) -> TaskResult:
    """Trains the task; see ``packing_core.training.tasks``.

    Raises:
        PackingError: the model or the tokenizer cannot be loaded, or an argument is none of the trainer's.
        ContaminationError: the audit before the first step finds that packed documents see each other.
    """
    if job.device not in ("auto", "cpu", "cuda", "cuda:0"):
        raise PackingError(
            f"--device {job.device}: --task {job.task} runs on the first visible GPU: pass cuda or cpu, and set "
            "CUDA_VISIBLE_DEVICES"
        )
    job.on_phase("building the model")
    task = KINDS[job.task](job)
    if job.images:
        job.on_phase("reading the images")
    with TemporaryDirectory() as scratch, _of_the_trainer(job):
        stopping = [EarlyStoppingCallback(job.early_stopping)] if job.early_stopping else []
        folder = job.checkpoints if job.checkpoints and job.save_every else Path(scratch)
        callbacks = [_StepLines(job.on_phase), *stopping]
        common = {"model": task.model, "processing_class": task.processor, "callbacks": callbacks}
        trainer = task.trainer(folder, common)
        trainer.remove_callback(PrinterCallback)
        job.on_phase("patching and auditing it")
        precision = "float8" if job.options.precision == "float8" else None
        packing = {"implementation": job.attention, "verify": False, "precision": precision}
        audit = audit_of(task.pack(trainer, packing))
        steps, seconds = _timed(job, trainer)
        result = TaskResult(
            steps=_steps(trainer),
            seconds=seconds,
            examples=steps * job.batch_size,
            audit=audit,
            device=device_name(trainer.args.device),
            skipped=task.skipped,
        )
    if job.output is not None and trainer.is_world_process_zero():
        task.write(trainer)
    return result


@contextmanager
def _of_the_trainer(job: TaskJob) -> Iterator[None]:
    """Names the task in what its trainer raises about its arguments and data, which are not Crosspack's own errors."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        module = str(frames[-1].f_globals.get("__name__", "")).split(".")[0]
        if isinstance(error, PackingError) or module not in (
            "trl",
            "transformers",
            "datasets",
            "accelerate",
            "sentence_transformers",
        ):
            raise
        raise PackingError(f"--task {job.task}: {type(error).__name__}: {first_line(error)}") from error


def _timed(job: TaskJob, trainer: Any) -> tuple[int, float]:
    """Trains; returns the steps of this run, without those before a checkpoint, and the seconds that they took."""
    newest = get_last_checkpoint(str(job.checkpoints)) if job.resume else None
    before = 0 if newest is None else int(newest.rpartition("-")[2])
    begin = time.perf_counter()
    trainer.train(resume_from_checkpoint=newest)
    seconds = time.perf_counter() - begin
    if job.held_out:
        trainer.evaluate()
    return trainer.state.global_step - before, seconds


class _StepLines(TrainerCallback):
    """Passes on a line for the steps that end: each of few, and ten in all of many."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or logs is None or not {"loss", "eval_loss"} & logs.keys():
            return
        every = max(1, state.max_steps // 10)
        if "eval_loss" in logs or state.global_step % every == 0 or state.global_step == state.max_steps:
            named = [f"{name} {float(value):.4g}" for name, value in logs.items() if _is_figure(name, value)]
            self.say(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(named[:6])}")


def _is_figure(name: str, value: Any) -> bool:
    """Returns whether a logged value is a figure of the task, and none of the machine."""
    return isinstance(value, int | float) and not name.endswith(("_runtime", "_per_second", "epoch", "num_tokens"))


def _steps(trainer: Any) -> list[dict[str, float]]:
    return [
        {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]
