"""The contract between ``crosspack train --task`` and the backends, for tasks that are trained by a Trainer.

These are all but the next token of plain text: ``sft`` is one of them where records have images.

The command reads the records, checks that each has the columns of the task, and fills a TaskJob. The function that the
entry point ``crosspack.tasks`` names audits the packed trainer, trains it unless documents see each other, and returns
a TaskResult. No framework, no console.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packing_core.errors import PackingError
from packing_core.training.job import Audit
from packing_core.training.options import Options

GROUP = "crosspack.tasks"

TaskName = Literal["sft", "dpo", "kto", "reward", "grpo", "classify", "mlm", "embed"]


@dataclass(frozen=True)
class Task:
    """A task of ``crosspack train``.

    Attributes:
        trains: what it trains, for people.
        columns: the sets of columns of which a record must have one; the first that it has is used.
        rows: whether the documents of the whole data set are packed into rows. Otherwise the forwards of each batch of
            examples run without padding.
        reads: parameters of the command that this task reads, besides those that every task does.
        images: whether records may have images; those of ``sft`` do.
    """

    trains: str
    columns: tuple[tuple[str, ...], ...]
    rows: bool = False
    reads: tuple[str, ...] = ()
    images: bool = False

    def columns_of(self, record: Mapping[str, Any], where: str, task: str) -> tuple[str, ...]:
        """Returns the columns of a record that the task reads.

        Raises:
            PackingError: the record has none of the sets, or one of their values is missing.
        """
        for columns in self.columns:
            if all(record.get(name) is not None for name in columns):
                return columns
        wanted = ", or ".join(" and ".join(columns) for columns in self.columns)
        raise PackingError(f"{where} has {', '.join(record) or 'nothing'}: --task {task} reads {wanted}")


_ROWS = ("capacity", "overflow")
TASKS: Mapping[TaskName, Task] = {
    "sft": Task(
        "next tokens of documents with images",
        (("messages",), ("prompt", "completion"), ("text",)),
        rows=True,
        reads=(*_ROWS, "loss"),
        images=True,
    ),
    "dpo": Task("preferences, by DPO", (("chosen", "rejected"),), images=True),
    "kto": Task("good and bad answers, by KTO", (("prompt", "completion", "label"),), images=True),
    "reward": Task("a reward model, on preferences", (("chosen", "rejected"),)),
    "grpo": Task("a policy by its rewards, by GRPO", (("prompt",),), images=True),
    "classify": Task("classes of documents", (("text", "label"), ("input_ids", "label")), rows=True, reads=_ROWS),
    "mlm": Task("masked tokens", (("text",), ("input_ids",)), rows=True, reads=_ROWS),
    "embed": Task("embeddings of texts, on pairs", (("anchor", "positive"),), reads=("overflow",)),
}


@dataclass(frozen=True)
class TaskJob:
    """Everything that a backend needs to train a task.

    Attributes:
        task: which one.
        model: a local folder or a hub name.
        tokenizer: the same, of its tokenizer.
        records, held_out: the examples to train and to evaluate on, each with the columns of the task. One with an
            attribute ``where`` is called by it in errors.
        options: the learning rate and what else is not of the task alone.
        arguments: further fields of the trainer's arguments, by name.
        batch_size: examples of an optimizer step, or rows where the task packs rows, of all processes together.
        capacity: tokens of a row, and ``overflow`` what to do with a longer document, where the task packs rows.
        epochs: over the records; ``steps`` ends the run earlier.
        loss: of documents with images, ``completion`` trains completions and what the assistant says, ``all`` all text.
        on_error: of a record whose images or tokens cannot be used: stop, or skip it.
        images: whether some records have images, for which the model and the tokenizer's processor are loaded.
        rewards: functions that score completions, as TRL calls them.
        eval_every: steps between evaluations; 0 for one at the end.
        save_every: steps between checkpoints below ``checkpoints``; 0 for none.
        keep_checkpoints: how many of the newest checkpoints stay.
        keep_best: write the weights with the lowest evaluation loss.
        early_stopping: end after so many evaluations without a lower loss; 0 for never.
        resume: continue from the newest checkpoint.
        merge_lora: add the adapters to the weights that are written.
        output: where the trained model goes; None keeps nothing.
        on_phase: called with one line when something slow begins, and as steps end.
    """

    task: TaskName
    model: str
    tokenizer: str
    records: Sequence[Mapping[str, Any]]
    options: Options
    held_out: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    capacity: int = 2048
    overflow: Literal["error", "truncate", "drop"] = "error"
    epochs: int = 1
    steps: int | None = None
    loss: Literal["completion", "all"] = "completion"
    on_error: Literal["stop", "skip"] = "stop"
    images: bool = False
    rewards: Sequence[Callable[..., Any]] = ()
    device: str = "auto"
    attention: str = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 1
    keep_best: bool = False
    early_stopping: int = 0
    resume: bool = False
    merge_lora: bool = False
    checkpoints: Path | None = None
    output: Path | None = None
    on_phase: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Attributes:
        steps: the figures of every optimizer step that was logged, by name: ``step``, ``loss`` and those of the task.
        seconds: of training, in this run.
        examples: that this run trained on, repetitions counted.
        audit: the verdict on the packed trainer.
        device: what it ran on, for people.
        skipped: why records were left out, each with its place.
    """

    steps: list[dict[str, float]]
    seconds: float
    examples: int
    audit: Audit
    device: str
    skipped: Sequence[str] = ()
