"""The contract between ``crosspack train --task`` and the backends, for tasks that are trained by a Trainer.

These are all but the next token of plain text: ``sft`` is one of them where records have images.

The command reads the records, checks that each has the columns of the task, and fills a TaskJob. The function that the
entry point ``crosspack.tasks`` names audits the packed trainer, trains it unless documents see each other, and returns
a TaskResult. No framework, no console.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import numpy as np

from packing_core.errors import PackingError
from packing_core.training.job import Audit, ModelJob

GROUP = "crosspack.tasks"

TaskName = Literal["sft", "dpo", "kto", "reward", "grpo", "classify", "mlm", "embed", "late", "rerank"]


@dataclass(frozen=True)
class Task:
    """A task of ``crosspack train``.

    Attributes:
        name: of ``--task``.
        trains: what it trains, for people.
        columns: the sets of columns of which a record must have one; the first that it has is used.
        reads: parameters of the command that this task reads, besides those that every task does.
        media: kinds of media that records may have, beside or in their texts.
        check: raises PackingError for values that the columns of a record may not have; takes the task's name too.
    """

    name: TaskName
    trains: str
    columns: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any], Sequence[str], str, str], None] = lambda record, columns, where, task: None

    def columns_of(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Returns the columns of a record that the task reads.

        Raises:
            PackingError: the record has none of the sets, or one of their values is missing.
        """
        for columns in self.columns:
            if all(record.get(name) is not None for name in columns):
                self.check(record, columns, where, self.name)
                return columns
        wanted = ", or ".join(" and ".join(columns) for columns in self.columns)
        raise PackingError(
            f"{where} has {', '.join(record) or 'nothing'}: --task {self.name} reads {wanted}: name a column that is "
            f"called otherwise, --column {self.columns[0][0]}=NAME"
        )


def _check_label(record: Mapping[str, Any], columns: Sequence[str], where: str, task: str) -> None:
    """Refuses an answer whose label is not true or false."""
    if not isinstance(record["label"], bool | int):
        raise PackingError(f"{where}: label is {record['label']!r}: --task {task} reads true or false")


def _check_texts(record: Mapping[str, Any], columns: Sequence[str], where: str, task: str) -> None:
    """Refuses a value that is no text, number or list of them, as its column asks for, and documents without labels."""
    for name in columns:
        several, numbers = name in ("documents", "labels"), name in ("score", "label", "labels")
        values = record[name] if several else [record[name]]
        fits = isinstance(values, list | tuple | np.ndarray) and len(values) > 0
        if not fits or not all(_is_number(x) if numbers else isinstance(x, str) for x in values):
            kind = "a number" if numbers else "a text"
            reads = f"a list, each {kind}" if several else kind
            raise PackingError(f"{where}: {name} is {reprlib.repr(record[name])}: --task {task} reads {reads}")
    if "labels" in columns and len(record["labels"]) != len(record["documents"]):
        raise PackingError(
            f"{where} has {len(record['labels'])} labels and {len(record['documents'])} documents: give each one"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


_IMAGES = ("image",)
_MEDIA = (*_IMAGES, "audio", "video")  # of which a video is refused by its place, where it is to be processed
_CUT = ("overflow",)
_ROWS = ("capacity", *_CUT)
_CHATS = (("messages",), ("prompt", "completion"), ("text",))
_CHOICES = (("chosen", "rejected", "prompt"), ("chosen", "rejected"))
_PAIRS = (("anchor", "positive", "negative"), ("anchor", "positive"), ("sentence1", "sentence2", "score"))
_QUERIES = (("query", "document", "label"), ("query", "documents", "labels"))
_TASKS = (
    Task(
        "sft", "next tokens of documents with images", _CHATS, reads=(*_ROWS, "loss"), media=("image", "video", "audio")
    ),
    Task("dpo", "preferences, by DPO", _CHOICES, reads=_CUT, media=_IMAGES),
    Task(
        "kto",
        "good and bad answers, by KTO",
        (("prompt", "completion", "label"),),
        reads=_CUT,
        media=_IMAGES,
        check=_check_label,
    ),
    Task("reward", "a reward model, on preferences", _CHOICES, reads=_CUT),
    Task("grpo", "a policy by its rewards, by GRPO", (("prompt",),), media=_IMAGES),
    Task("classify", "classes of documents", (("text", "label"), ("input_ids", "label")), reads=_ROWS),
    Task("mlm", "masked tokens", (("text",), ("input_ids",)), reads=_ROWS),
    Task("embed", "embeddings of texts, on pairs", _PAIRS, reads=_CUT, check=_check_texts),
    Task("late", "embeddings of the tokens of texts, on pairs", _PAIRS[:2], reads=_CUT, check=_check_texts),
    Task("rerank", "scores of documents for a query", _QUERIES, reads=_CUT, check=_check_texts),
)
TASKS: Mapping[TaskName, Task] = {task.name: task for task in _TASKS}


@dataclass(frozen=True, kw_only=True)
class TaskJob(ModelJob):
    """Everything that a backend needs to train a task on examples.

    Attributes:
        task: which one.
        model, tokenizer: a local folder or a hub name.
        records, held_out: the examples to train and to evaluate on, each with the columns of the task. One with an
            attribute ``where`` is called by it in errors.
        arguments: further fields of the trainer's arguments, by name.
        batch_size: examples of an optimizer step, or rows where the task packs rows, of all processes together.
        capacity: tokens of a row, where the task packs rows.
        overflow: what to do with a document that is longer than a row or, where no rows are packed, than the model.
        epochs: over the records; ``steps`` ends the run earlier.
        loss: of documents with images, ``completion`` trains completions and what the assistant says, ``all`` all text.
        on_error: of a record whose images or tokens cannot be used: stop, or skip it.
        images: whether some records have images, for which the model and the tokenizer's processor are loaded.
        rewards: functions that score completions, as TRL calls them.
    """

    model: str
    task: TaskName
    tokenizer: str
    records: Sequence[Mapping[str, Any]]
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
