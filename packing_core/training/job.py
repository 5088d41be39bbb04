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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from packing_core.errors import PackingError
from packing_core.training.schedule import Run, Schedule

GROUP = "crosspack.trainers"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Options:
    """What decides the losses, besides the data and the model.

    Attributes:
        lr: peak learning rate of AdamW (betas 0.9 and 0.999, eps 1e-8).
        decay: ``cosine``, ``linear`` (both to zero) or ``constant``.
        warmup: share of the steps over which the rate rises linearly to its peak.
        weight_decay: decoupled weight decay.
        clip: the gradient is scaled down to this norm; 0 leaves it.
        precision: what the forward computes in; parameters and optimizer states are float32 either way.
        seed: initial weights, dropout and the order of documents.
    """

    lr: float = 1e-3
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    def learning_rate(self, step: int, steps: int) -> float:
        """The rate of 0-based ``step`` of ``steps``."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        done = (step - rising) / max(1, steps - rising)
        share = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[self.decay]
        return self.lr * share


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step of one run did.

    Attributes:
        run: ``packed``, ``padded`` or ``grouped``.
        step: 0-based.
        loss: sum of the cross-entropies of the step's targets over their number, before the update.
        tokens: real tokens.
        slots: tokens that the model computed, padding included.
        seconds: wall time, from building the first batch to the end of the update on the device.
    """

    run: Run
    step: int
    loss: float
    tokens: int
    slots: int
    seconds: float


@dataclass(frozen=True)
class TrainJob:
    """All that a backend needs to train; see the module's docstring.

    Attributes:
        model: a local folder, a hub name, or the contents of a ``config.json`` (random weights by ``options.seed``).
        schedule: the batches of every step.
        options: what decides the losses.
        runs: which runs, each from the same initial weights, step by step in turn; only ``packed`` is kept.
        device: ``auto`` or what the framework calls it.
        attention: the name of an attention implementation, or ``auto``.
        gradient_checkpointing: recompute activations in the backward pass.
        deterministic: use only kernels that repeat to the bit.
        trust_remote_code: whether code in the model's folder may run.
        output: where the trained model goes, in the Hugging Face format; None keeps nothing.
        checkpoints: where checkpoints go; by default ``checkpoints`` in ``output``.
        save_every: steps between checkpoints; 0 for none.
        resume: continue from the newest checkpoint.
        on_step: called after every step.
        on_phase: called with one line when something slow begins that is not a step.
    """

    model: str | Mapping[str, Any]
    schedule: Schedule
    options: Options = field(default_factory=Options)
    runs: tuple[Run, ...] = ("packed",)
    device: str = "auto"
    attention: str = "auto"
    gradient_checkpointing: bool = False
    deterministic: bool = False
    trust_remote_code: bool = False
    output: Path | None = None
    checkpoints: Path | None = None
    save_every: int = 0
    resume: bool = False
    on_step: Callable[[StepRecord], None] = lambda record: None
    on_phase: Callable[[str], None] = lambda line: None

    def check_vocabulary(self, size: int) -> None:
        """Raise unless every token has one of the model's ``size`` embeddings.

        Raises:
            PackingError: the tokenizer is not the model's.
        """
        largest = int(self.schedule.corpus.documents.values.max())
        if largest >= size:
            raise PackingError(
                f"the data has token {largest:,} and the model {size:,} embeddings: pass the model's own --tokenizer"
            )

    def check_positions(self, size: int | None) -> None:
        """Raise unless the model has a position for every token of a segment; None: it has no limit.

        Raises:
            PackingError: a segment is longer than the model allows.
        """
        longest = max(int(plan.length.max()) for plan in self.schedule.plans)
        if size is not None and longest > size:
            raise PackingError(
                f"a document has {longest:,} tokens and the model {size:,} positions: pass --capacity {size} and "
                f"--overflow split, truncate or drop"
            )

    def learning_rate(self, step: int) -> float:
        """The learning rate of 0-based ``step``."""
        return self.options.learning_rate(step, len(self.schedule))

    def record(self, run: Run, step: int, loss: float, seconds: float) -> StepRecord:
        """Make the record of a finished step, report it and return it.

        Raises:
            PackingError: the loss is not finite.
        """
        if not math.isfinite(loss):
            raise PackingError(f"the loss of step {step} ({run}) is {loss}: lower --lr, or train in float32")
        schedule = self.schedule
        record = StepRecord(run, step, loss, schedule.steps[step].n_tokens, schedule.slots(step, run), seconds)
        self.on_step(record)
        return record

    def identity(self, steps: int) -> dict[str, Any]:
        """What decided the first ``steps`` steps: the options, the model, digests of data and rows, the learning rates.

        A job that agrees in all of it would have taken the same steps, so it can continue from there, also with more
        steps than were planned before.
        """
        schedule = self.schedule
        data, rows = hashlib.sha256(), hashlib.sha256()
        for ragged in (schedule.corpus.documents, schedule.corpus.trained):
            data.update(ragged.values.tobytes())
            data.update(ragged.offsets.tobytes())
        for plan in schedule.steps[:steps]:
            for array in (plan.row_offsets, plan.source, plan.start, plan.length):
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
    """Whether packed training of this model was found exact, and the line that says how it was judged."""

    exact: bool
    line: str


@dataclass(frozen=True)
class TrainResult:
    """What a trainer hands back.

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
        difference: of the first batch's logits from those of each document alone in float32, by the largest logit.
        allowed: the difference that rounding explains.
        failure: why there are no figures.
        cpu: as in :class:`TrainResult`, of all ways together.
    """

    way: str
    tokens_per_second: float = 0.0
    peak_bytes: int | None = None
    difference: float = float("inf")
    allowed: float = 0.0
    failure: str = ""
    cpu: float | None = None

    @property
    def verdict(self) -> str:
        if self.failure:
            return "failed"
        return "exact" if self.difference <= self.allowed else "contaminated"


def is_hub_name(name: str) -> bool:
    """Whether ``name`` can be a Hugging Face hub name, ``name`` or ``owner/name``."""
    return _HUB_NAME.fullmatch(name) is not None and not name.startswith(".")
