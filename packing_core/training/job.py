"""The contract between ``crosspack train`` and the backends' trainers; no framework, no console.

The command fills a TrainJob and hands it to the function that the entry point ``crosspack.trainers`` names. The trainer
builds the model, runs ``job.runs`` over ``job.schedule``, reports every step through ``job.on_step`` and returns a
TrainResult. What must be equal on every backend (which documents, the learning rate of a step, by what a loss is
divided, what a checkpoint holds) is decided here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from packing_core.errors import ContaminationError, PackingError, UnsupportedError
from packing_core.training.options import Options
from packing_core.training.records import StepRecord, best_record, without_progress
from packing_core.training.schedule import Run, Schedule

GROUP = "crosspack.trainers"
_HONOURS = "honours"  # the attribute of a trainer that names the options it honours beyond those of every trainer
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


Strategy = Literal["ddp", "fsdp", "zero2", "zero3"]
ZERO = ("zero2", "zero3")  # the strategies that DeepSpeed serves
Trainer = TypeVar("Trainer", bound=Callable[..., Any])


def honours(*options: str) -> Callable[[Trainer], Trainer]:
    """Mark a trainer as one that honours options which not every backend has, named as on the command line."""

    def mark(trainer: Trainer) -> Trainer:
        vars(trainer)[_HONOURS] = frozenset(options)
        return trainer

    return mark


def check_honoured(trainer: Callable[..., Any], backend: str, used: Iterable[str]) -> None:
    """Raise unless a trainer honours the options that are ``used``, of those that not every backend has.

    Raises:
        UnsupportedError: it would ignore one.
    """
    for option in used:
        if option not in getattr(trainer, _HONOURS, ()):
            raise UnsupportedError(f"--backend {backend} has no {option}: leave it out, or pass another --backend")


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """Holds what the jobs of all tasks have in common.

    Attributes:
        model: a local folder, a hub name, or the contents of a ``config.json`` (random weights by ``options.seed``).
        options: what decides the losses.
        device: ``auto`` or what the framework calls it.
        attention: the name of an attention implementation, or ``auto``.
        gradient_checkpointing: recompute activations in the backward pass.
        trust_remote_code: whether code in the model's folder may run.
        eval_every: steps between evaluations; there is one after the last step in any case.
        output: where the trained model goes, in the Hugging Face format; None keeps nothing. Of several ranks, rank 0
            writes.
        merge_lora: add the adapters to the weights that are written, which need no peft then.
        checkpoints: where checkpoints go.
        save_every: steps between checkpoints; 0 for none.
        keep_checkpoints: how many of the newest checkpoints stay.
        keep_best: write the weights of the step with the lowest evaluation loss, in place of the last step's.
        early_stopping: end after so many evaluations without a lower loss; 0 for never.
        resume: continue from the newest checkpoint.
        on_phase: called with one line when something slow begins that is not a step.
    """

    model: str | Mapping[str, Any]
    options: Options = field(default_factory=Options)
    device: str = "auto"
    attention: str = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    eval_every: int = 0
    output: Path | None = None
    merge_lora: bool = False
    checkpoints: Path | None = None
    save_every: int = 0
    keep_checkpoints: int = 1
    keep_best: bool = False
    early_stopping: int = 0
    resume: bool = False
    on_phase: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, kw_only=True)
class TrainJob(ModelJob):
    """Everything that a backend needs to train on packed documents; see the module's docstring.

    Attributes:
        schedule: the batches of every step.
        evaluation: the documents that are evaluated, packed; None evaluates nothing.
        compile: whether layers are compiled; None leaves it to the backend.
        strategy: how several ranks train: ``ddp`` keeps all weights on each, ``fsdp`` shards them; ``zero2`` and
            ``zero3`` are DeepSpeed's ZeRO, which shards optimizer states and gradients, and in stage 3 weights.
        context_parallel: ranks over which the documents of each row are cut; such groups of ranks train on different
            rows.
        mesh: axis -> number of devices, of one process over several: rows are spread over ``data`` and ``fsdp``,
            weights are cut over ``fsdp``, heads and MLPs over ``tensor``, tokens over ``context``. Empty for one
            device.
        runs: which runs, each from the same initial weights; only ``packed`` is kept.
        deterministic: use only kernels that repeat to the bit.
        prompts: token ids that the model continues after every evaluation and at the end.
        on_step: called after every step.
        on_sample: called with the number of finished steps, that of a prompt, and the token ids of its continuation.
    """

    schedule: Schedule
    evaluation: Schedule | None = None
    compile: bool | None = None
    strategy: Strategy = "ddp"
    context_parallel: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    runs: tuple[Run, ...] = ("packed",)
    deterministic: bool = False
    prompts: tuple[tuple[int, ...], ...] = ()
    on_step: Callable[[StepRecord], None] = lambda record: None
    on_sample: Callable[[int, int, list[int]], None] = lambda steps, prompt, ids: None

    def check_vocabulary(self, size: int) -> None:
        """Raise unless every token has one of the model's ``size`` embeddings.

        Raises:
            PackingError: the tokenizer is not the model's.
        """
        largest = max(int(schedule.corpus.documents.values.max()) for schedule in self._schedules)
        if largest >= size:
            raise PackingError(
                f"the data has token {largest:,} and the model {size:,} embeddings: pass the model's own --tokenizer"
            )

    def check_positions(self, size: int | None) -> None:
        """Raise unless the model has a position for every token of a segment; None: it has no limit.

        Raises:
            PackingError: a segment is longer than the model allows.
        """
        longest = max(int(plan.length.max()) for schedule in self._schedules for plan in schedule.plans)
        if size is not None and longest > size:
            raise PackingError(
                f"a document has {longest:,} tokens and the model {size:,} positions: pass --capacity {size} and "
                f"--overflow split, truncate or drop"
            )

    @property
    def _schedules(self) -> list[Schedule]:
        return [self.schedule] if self.evaluation is None else [self.schedule, self.evaluation]

    def evaluates_after(self, step: int) -> bool:
        """Returns whether an evaluation follows 0-based ``step`` of the packed run."""
        done = step + 1
        due = done == len(self.schedule) or (self.eval_every > 0 and done % self.eval_every == 0)
        return self.evaluation is not None and due

    def saves_after(self, records: Sequence[StepRecord]) -> bool:
        """Returns whether a checkpoint follows the last of these records: it is due, or the best one so far."""
        due = self.save_every > 0 and len(records) % self.save_every == 0
        return due or (self.keep_best and records[-1].eval_loss is not None and best_record(records) is records[-1])

    def stops_after(self, records: Sequence[StepRecord]) -> bool:
        """Returns whether the run ends early after these records."""
        return 0 < self.early_stopping <= without_progress(records)

    def learning_rate(self, step: int) -> float:
        """The learning rate of 0-based ``step``."""
        return self.options.learning_rate(step, len(self.schedule))

    def record(
        self,
        run: Run,
        step: int,
        loss: float,
        seconds: float,
        *,
        grad_norm: float | None = None,
        eval_loss: float | None = None,
    ) -> StepRecord:
        """Make the record of a finished step, report it and return it.

        Raises:
            PackingError: a loss or the norm of the gradients is not finite.
        """
        for name, value in (("loss", loss), ("gradient norm", grad_norm), ("evaluation loss", eval_loss)):
            if value is not None and not math.isfinite(value):
                raise PackingError(f"the {name} of step {step} ({run}) is {value}: lower --lr, or train in float32")
        slots = self.schedule.slots(step, run)
        record = StepRecord(run, step, loss, self.schedule.steps[step].n_tokens, slots, seconds, eval_loss, grad_norm)
        self.on_step(record)
        return record

    def identity(self, steps: int) -> dict[str, Any]:
        """Describes what decided the first ``steps`` steps: options, model, digests of data and rows, learning rates.

        A job that agrees in all of it would have taken the same steps, so it can continue from there, also with more
        steps than were planned before.
        """
        schedule = self.schedule
        data, rows = hashlib.sha256(), hashlib.sha256()
        for ragged in (schedule.corpus.documents, schedule.corpus.trained):
            data.update(ragged.values.tobytes())
            data.update(ragged.offsets.tobytes())
        for plan in schedule.steps[:steps]:
            for array in (plan.row_offsets, plan.source, plan.start, plan.length, plan.context):
                rows.update(array.tobytes())
        model = self.model if isinstance(self.model, str) else json.dumps(dict(self.model), sort_keys=True)
        return {
            **asdict(self.options),
            "model": model,
            "data": data.hexdigest(),
            "rows": rows.hexdigest(),
            "learning rates": [self.learning_rate(step) for step in range(min(steps, len(schedule)))],
        }


@dataclass(frozen=True)
class Audit:
    """The verdict on packed training of this model, and the line that says how it was judged."""

    exact: bool
    line: str

    def checked(self) -> Audit:
        """
        Raises:
            ContaminationError: documents that are packed together see each other.
        """
        if not self.exact:
            raise ContaminationError(f"audit: documents that are packed together see each other: {self.line}")
        return self


@dataclass(frozen=True)
class TrainResult:
    """The result of a training job.

    Attributes:
        records: every step of every run, those before a resume included.
        audit: the verdict on the packed model.
        device: what it ran on, for people.
        attention: which attention implementation the packed run used.
        peak_bytes: most device memory of each run by itself, where the device counts it.
        cpu: what the steps got of the processor time that their threads could use
            (:class:`~packing_core.training.timing.Clock`); None if not measured.
    """

    records: dict[Run, list[StepRecord]]
    audit: Audit
    device: str
    attention: str
    peak_bytes: dict[Run, int] = field(default_factory=dict)
    cpu: float | None = None


@dataclass(frozen=True)
class Measured:
    """One way to train.

    Attributes:
        way: its name in the table.
        tokens_per_second: real tokens of a whole optimizer step over its time, the median of all steps.
        peak_bytes: device memory at most; None where the device does not count it.
        difference: of the worst row's logits from those of each document alone in float32, by the largest logit.
        allowed: the difference that rounding explains.
        failure: why there are no figures.
        judged: rows of several documents whose logits were compared with those of each document alone.
        cpu: as in :class:`TrainResult`, of all ways together.
    """

    way: str
    tokens_per_second: float = 0.0
    peak_bytes: int | None = None
    difference: float = float("inf")
    allowed: float = 0.0
    failure: str = ""
    judged: int = 0
    cpu: float | None = None

    @property
    def verdict(self) -> str:
        if self.failure:
            return "failed"
        if not self.judged:
            return "not judged"
        return "exact" if self.difference <= self.allowed else "contaminated"


def is_hub_name(name: str) -> bool:
    """Returns whether ``name`` can be a Hugging Face hub name, ``name`` or ``owner/name``."""
    return _HUB_NAME.fullmatch(name) is not None and not name.startswith(".")
