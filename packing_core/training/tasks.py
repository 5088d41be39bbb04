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

from packing_core.errors import PackingError, plural
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
    """

    name: TaskName
    trains: str
    columns: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...] = ()
    media: tuple[str, ...] = ()

    def columns_of(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Returns the columns of a record that the task reads.

        Raises:
            PackingError: the record has none of the sets, or one of their values is missing or of another kind.
        """
        for columns in self.columns:
            if all(record.get(name) is not None for name in columns):
                for name in columns:
                    reads = _VALUES.get((self.name, name), _VALUES.get(name, "a text"))
                    if not _FITS[reads](record[name]):
                        value = reprlib.repr(record[name])
                        raise PackingError(f"{where}: {name} is {value}: --task {self.name} reads {reads}")
                labels, documents = (len(record[name]) if name in columns else 0 for name in ("labels", "documents"))
                if labels != documents:
                    counts = f"{plural(labels, 'label')} and {plural(documents, 'document')}"
                    raise PackingError(f"{where} has {counts}: give each document a label")
                return columns
        wanted = ", or ".join(" and ".join(columns) for columns in self.columns)
        raise PackingError(
            f"{where} has {', '.join(record) or 'nothing'}: --task {self.name} reads {wanted}: name a column that is "
            f"called otherwise, --column {self.columns[0][0]}=NAME"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return type(value) is int or isinstance(value, np.integer)


def _are(fits: Callable[[Any], bool], values: object) -> bool:
    return isinstance(values, list | tuple | np.ndarray) and len(values) > 0 and all(map(fits, values))


def _is_prompt(value: object) -> bool:
    return value != "" if isinstance(value, str) else _are(lambda turn: isinstance(turn, Mapping), value)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number": _is_number,
    "true or false": lambda value: isinstance(value, int) and value in (0, 1),
    "a text or a whole number": lambda value: isinstance(value, str | int),
    "a list of texts": lambda value: _are(lambda text: isinstance(text, str), value),
    "a list of numbers": lambda value: _are(_is_number, value),
    "a list of whole numbers": lambda value: _are(_is_whole, value),
    "a list of messages": lambda value: isinstance(value, list | tuple | np.ndarray),
    "a text or messages": lambda value: isinstance(value, str) or _is_prompt(value),
    "a text that is not empty, or messages": _is_prompt,
}
# a column, or the column of one task -> what it holds; columns that are not named hold a text
_VALUES: Mapping[str | tuple[str, str], str] = {
    "messages": "a list of messages",
    **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), "a text or messages"),
    "labels": "a list of numbers",
    "input_ids": "a list of whole numbers",
    **dict.fromkeys(("label", "score"), "a number"),
    "documents": "a list of texts",
    ("grpo", "prompt"): "a text that is not empty, or messages",
    ("kto", "label"): "true or false",
    ("classify", "label"): "a text or a whole number",
}
_IMAGES = ("image",)
_MEDIA = (*_IMAGES, "audio", "video")  # videos are refused where the messages are processed
_CUT = ("overflow",)
_ROWS = ("capacity", *_CUT)
_CHATS = (("messages",), ("prompt", "completion"), ("text",))
_CHOICES = (("chosen", "rejected", "prompt"), ("chosen", "rejected"))
_PAIRS = (("anchor", "positive", "negative"), ("anchor", "positive"), ("sentence1", "sentence2", "score"))
_QUERIES = (("query", "document", "label"), ("query", "documents", "labels"))
_TASKS = (
    Task("sft", "next tokens of documents with images", _CHATS, reads=(*_ROWS, "loss"), media=_MEDIA),
    Task("dpo", "preferences, by DPO", _CHOICES, reads=_CUT, media=_IMAGES),
    Task("kto", "good and bad answers, by KTO", (("prompt", "completion", "label"),), reads=_CUT, media=_IMAGES),
    Task("reward", "a reward model, on preferences", _CHOICES, reads=_CUT),
    Task("grpo", "a policy by its rewards, by GRPO", (("prompt",),), media=_IMAGES),
    Task("classify", "classes of documents", (("text", "label"), ("input_ids", "label")), reads=_ROWS),
    Task("mlm", "masked tokens", (("text",), ("input_ids",)), reads=_ROWS),
    Task("embed", "embeddings of texts, on pairs", _PAIRS, reads=_CUT),
    Task("late", "embeddings of the tokens of texts, on pairs", _PAIRS[:2], reads=_CUT),
    Task("rerank", "scores of documents for a query", _QUERIES, reads=_CUT),
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
