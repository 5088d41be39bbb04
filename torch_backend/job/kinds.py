"""The kinds of tasks behind ``crosspack train --task``: each has its model, data, trainer, packing and output.

A TaskJob -> the :class:`TaskKind` of its task, which loads the model -> :meth:`~TaskKind.trainer`, built of the job's
records -> :meth:`~TaskKind.pack`, with a verdict -> :meth:`~TaskKind.write`. Those of sentence-transformers are in
:mod:`.retrieval`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from packing_core.errors import CapacityError, LayoutError, PackingError, naming
from packing_core.extras import require
from packing_core.training.tasks import TASKS, TaskJob
from torch_backend.auditing.model import AuditReport, verify
from torch_backend.auditing.trainer import TrainerReport, audit_trainer
from torch_backend.collate import PackedCollator
from torch_backend.collate.pictures import has_own_pictures, pictures_of, turns_of
from torch_backend.collate.vision import place_of
from torch_backend.collate.vision_dataset import PackedMediaDataset
from torch_backend.job.models import load_model, shared_arguments, with_adapters, write_model
from torch_backend.trainers.enable_packing import enable_packing

require("transformers", extra="hf")

import transformers  # noqa: E402

Records = Sequence[Mapping[str, Any]]
_CHATS = ("prompt", "completion", "chosen", "rejected")


class TaskKind:
    """A task, trained by a ``transformers.Trainer`` or a subclass of it.

    Attributes:
        model, processor: loaded; the processor is a tokenizer unless records have images.
        skipped: why records were left out.

    Raises:
        PackingError: the model or the processor cannot be loaded.
    """

    head = ""  # transformers' class of the model; "" is that of a language model
    adapters = "CAUSAL_LM"  # peft's name of the task, by which it knows which heads are trained whole
    fixed: ClassVar[Mapping[str, Any]] = {}  # arguments of the trainer, unless --set names them

    def __init__(self, job: TaskJob) -> None:
        self.job = job
        self.skipped: list[str] = []
        self.model, self.processor = self.load()

    def load(self) -> tuple[Any, Any]:
        """Loads the model with the head of the task, in the dtype of its weights, and the processor."""
        job, processor = self.job, _processor(self.job)
        plain = _with_media(processor, job) if job.images else "AutoModelForCausalLM"
        model = load_model(job, self.head or plain, **self.model_options())
        # a decoder's classifier finds the end of a document by it
        if not job.images and model.config.pad_token_id is None:
            model.config.pad_token_id = processor.pad_token_id
        if job.options.lora:
            model = with_adapters(model, job.options, self.adapters)
        return model, processor

    def model_options(self) -> dict[str, Any]:
        """Returns what ``from_pretrained`` of the model takes beside its name."""
        return {}

    def data(self) -> dict[str, Any]:
        """Returns the trainer's arguments that hold the records."""
        held_out = {"eval_dataset": self.dataset(self.job.held_out)} if self.job.held_out else {}
        return {"train_dataset": self.dataset(self.job.records), **held_out}

    def dataset(self, records: Records) -> Any:
        """Returns records as the trainer reads them."""
        return _dataset([self.example(record) for record in records])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Returns the columns that all records have: those of the first one of the data."""
        first = self.job.records[0]
        return TASKS[self.job.task].columns_of(first, place_of(first, 0))

    def alike(self, records: Records) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns the records with the columns of the first one of the data, each with its place.

        Raises:
            PackingError: one has others; under ``on_error="skip"`` it is left out.
        """
        task, columns, usable = TASKS[self.job.task], self.columns, []
        for number, record in enumerate(records):
            where = place_of(record, number)
            try:
                own = task.columns_of(record, where)
                if own != columns:
                    raise PackingError(
                        f"{where} has {', '.join(own)}, and the first record of --data {', '.join(columns)}: give all "
                        "the same columns"
                    )
            except PackingError as error:
                if self.job.on_error == "stop":
                    raise
                self.skipped.append(str(error))
            else:
                usable.append((where, record))
        return usable

    def example(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a record as the trainer reads it."""
        return dict(record)

    def trainer(self, folder: Path, common: Mapping[str, Any]) -> Any:
        """Builds the trainer of what all trainers take; its checkpoints go to ``folder``.

        Raises:
            PackingError: a record cannot be used, or the trainer's library refuses an argument.
        """
        data, arguments = self.data(), task_arguments(self.job, transformers.TrainingArguments, folder, **self.fixed)
        return transformers.Trainer(args=arguments, data_collator=self.collator(), **data, **common)

    def collator(self) -> Any:
        """Returns the collator of the documents of a batch."""

    def pack(self, trainer: Any, options: Mapping[str, Any]) -> AuditReport | TrainerReport:
        """Packs the trainer in place by ``options`` of ``enable_packing``; returns the report on it."""
        enable_packing(trainer, **options)
        return audit_trainer(trainer)

    def write(self, trainer: Any) -> None:
        """Writes the trained model and its processor."""
        write_model(self.job, trainer.accelerator.unwrap_model(trainer.model))
        self.processor.save_pretrained(self.job.output)


class ImageDocuments(TaskKind):
    """Next tokens of documents with images, which are packed into rows before the trainer is built."""

    fixed: ClassVar[Mapping[str, Any]] = {"remove_unused_columns": False}

    def dataset(self, records: Records) -> Any:
        job = self.job
        rows = PackedMediaDataset(
            records,
            job.capacity,
            self.model,
            self.processor,
            loss="assistant" if job.loss == "completion" else "all",
            on_error="raise" if job.on_error == "stop" else "skip",
            overflow=job.overflow,
            seed=job.options.seed,
        )
        self.skipped += rows.skipped.values()
        return rows

    def collator(self) -> Any:
        return PackedCollator(self.model, processor=self.processor)


class MaskedTokens(TaskKind):
    """Masked tokens of documents, whose rows are packed by the trainer's port."""

    head = "AutoModelForMaskedLM"

    def dataset(self, records: Records) -> Any:
        """Returns the tokens of the records.

        Raises:
            PackingError: a record has none; under ``on_error="skip"`` it is left out, unless all are.
        """
        examples, empty = [], list[str]()
        for number, record in enumerate(records):
            if len((example := self.example(record))["input_ids"]):
                examples.append(example)
            else:
                empty.append(f"{place_of(record, number)} has no tokens")
        if empty and self.job.on_error == "stop":
            raise PackingError(f"{empty[0]}: leave it out, or pass --on-error skip")
        if not examples:
            raise none_of(records, empty)
        self.skipped += empty
        return _dataset(examples)

    def example(self, record: Mapping[str, Any]) -> dict[str, Any]:
        ids = record.get("input_ids")
        return {"input_ids": self.processor(record["text"])["input_ids"] if ids is None else list(ids)}

    def collator(self) -> Any:
        return transformers.DataCollatorForLanguageModeling(self.processor)

    def pack(self, trainer: Any, options: Mapping[str, Any]) -> AuditReport:
        report = verify(trainer.model, self.job.attention)
        enable_packing(trainer, capacity=self.job.capacity, overflow=self.job.overflow, **options)
        return report


class Classes(MaskedTokens):
    """Classes of documents; the labels are those of the records, sorted."""

    head = "AutoModelForSequenceClassification"
    adapters = "SEQ_CLS"

    def model_options(self) -> dict[str, Any]:
        labels = {record["label"] for record in [*self.job.records, *self.job.held_out]}
        kinds = {type(label).__name__ for label in labels}
        if not kinds <= {"int", "str", "bool"} or len(kinds) > 1:
            raise PackingError(
                f"--task classify: labels are {' and '.join(sorted(kinds))}: they must be all str or all int"
            )
        if len(labels) < 2:
            raise PackingError(
                f"--task classify: the only label is {next(iter(labels))!r}: pass records of two classes or more"
            )
        self.numbers = {label: number for number, label in enumerate(sorted(labels))}
        names = {str(label): number for label, number in self.numbers.items()}
        return {"label2id": names, "id2label": {number: name for name, number in names.items()}}

    def example(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return super().example(record) | {"label": self.numbers[record["label"]]}

    def collator(self) -> Any:
        return transformers.DataCollatorWithPadding(self.processor)


class Answers(TaskKind):
    """A task of TRL, whose trainer tokenises prompts and answers itself."""

    def dataset(self, records: Records) -> Any:
        """Returns records as TRL reads them; those with images have them in a column ``images``.

        Raises:
            PackingError: a record cannot be used, or under ``on_error="skip"`` none can.
        """
        datasets, before, examples = require("datasets", extra="hf"), len(self.skipped), []
        for where, record in self.alike(records):
            example = self.example(record)
            try:
                examples.append(_with_images(example, where) if self.job.images else example)
            except PackingError as error:
                if self.job.on_error == "stop":
                    raise
                self.skipped.append(str(error))
        if not examples:
            raise none_of(records, self.skipped[before:])
        dataset = _dataset(examples)
        return dataset.cast_column("images", datasets.Sequence(datasets.Image())) if self.job.images else dataset

    def example(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name != "prompt" or value is not None}

    def trainer(self, folder: Path, common: Mapping[str, Any]) -> Any:
        job, trl = self.job, require("trl", extra="hf")
        cuts = "overflow" in TASKS[job.task].reads and not job.images
        longest = _longest(self.model, self.processor) if cuts else None
        limit = {} if longest is None else {"max_length": longest if job.overflow == "truncate" else None}
        rewards = {"reward_funcs": list(job.rewards)} if job.rewards else {}
        kind = "Reward" if job.task == "reward" else job.task.upper()  # as TRL writes it
        arguments = task_arguments(job, getattr(trl, f"{kind}Config"), folder, **limit)
        trainer = getattr(trl, f"{kind}Trainer")(args=arguments, **self.data(), **rewards, **common)
        if longest is not None and "max_length" not in job.arguments and job.overflow != "truncate":
            for name in ("train_dataset", "eval_dataset"):
                if (dataset := getattr(trainer, name)) is not None:
                    setattr(trainer, name, self._fitting(dataset, longest))
        return trainer

    def _fitting(self, dataset: Any, longest: int) -> Any:
        """Refuses answers that are longer than the model, prompt included, or drops them; TRL truncates.

        Raises:
            CapacityError: one is too long, and ``overflow`` is ``error``.
        """
        if self.job.overflow == "drop":
            return dataset.filter(lambda example: _tokens(example) <= longest)
        for number, example in enumerate(dataset):
            if (count := _tokens(example)) > longest:
                raise CapacityError(
                    f"record {number} has an answer of {count:,} tokens with its prompt and the model takes "
                    f"{longest:,}: pass --overflow {'drop' if self.job.task == 'reward' else 'truncate or drop'}"
                )
        return dataset


class RewardModel(Answers):
    """A reward model, on preferences."""

    head = "AutoModelForSequenceClassification"
    adapters = "SEQ_CLS"

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": 1}


def none_of(records: Records, skipped: Sequence[str]) -> PackingError:
    """The error of records that were all left out, with the first reason if ``skipped`` has any."""
    why = f", the first because {skipped[0]}" if skipped else ""
    return PackingError(f"none of the {len(records):,} records can be used{why}")


def _dataset(examples: Sequence[Mapping[str, Any]]) -> Any:
    """Returns a data set with all columns of the examples; ``Dataset.from_list`` takes those of the first alone.

    Raises:
        PackingError: a column has values of several types, or of one that Arrow does not have.
    """
    datasets, columns = require("datasets", extra="hf"), []
    for name in dict.fromkeys(name for example in examples for name in example):
        way_out = "give all its values one type, or leave it out"
        with naming(f'the records\' column "{name}" cannot be one column', way_out=way_out):
            columns.append(datasets.Dataset.from_dict({name: [example.get(name) for example in examples]}))
    return datasets.concatenate_datasets(columns, axis=1)


def _processor(job: TaskJob) -> Any:
    """Loads the tokenizer, or the processor of records with images; it pads with its EOS if it has nothing else.

    Raises:
        PackingError: it cannot be loaded.
    """
    what, auto = ("processor", "AutoProcessor") if job.images else ("tokenizer", "AutoTokenizer")
    with naming(f"{what} {job.tokenizer}"):
        loaded = getattr(transformers, auto).from_pretrained(job.tokenizer, trust_remote_code=job.trust_remote_code)
    if job.images and not any(getattr(loaded, part, None) for part in ("image_processor", "feature_extractor")):
        raise PackingError(
            f"records have images or audio, and {job.tokenizer} has no processor of them, only "
            f"{type(loaded).__name__}: pass a model that takes them, or leave them out of the records"
        )
    tokenizer = loaded.tokenizer if job.images else loaded
    if job.images and job.task == "grpo":
        tokenizer.padding_side = "left"  # TRL completes prompts as the processor pads them
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return loaded


def _with_media(processor: Any, job: TaskJob) -> str:
    """Returns the class of transformers that loads a model of images, or of audio."""
    if getattr(processor, "feature_extractor", None) is None:
        return "AutoModelForImageTextToText"
    with naming(f"--model {job.model}"):
        config = transformers.AutoConfig.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
    known = transformers.models.auto.modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return "AutoModelForSeq2SeqLM" if config.model_type in known else "AutoModelForMultimodalLM"


def _longest(model: Any, tokenizer: Any) -> int:
    """Returns the number of tokens of a text that both the model and its tokenizer take."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(tokenizer.model_max_length), positions or int(tokenizer.model_max_length))


def _tokens(example: Mapping[str, Any]) -> int:
    """Counts the tokens of the longest answer of an example, with its prompt."""
    answers = [len(ids) for name, ids in example.items() if name.endswith("_ids") and name != "prompt_ids"]
    return len(example.get("prompt_ids", ())) + max(answers)


def task_arguments(job: TaskJob, kind: type[Any], folder: Path, **own: Any) -> Any:
    """Returns the trainer's arguments: those of the options, and of ``--set`` whatever else it has.

    Raises:
        PackingError: its library refuses one.
    """
    defaults = {field.name: field.default for field in fields(kind)}
    for name in job.arguments.keys() - defaults.keys():
        near = get_close_matches(name, defaults, n=1)
        hint = f": is it {near[0]}?" if near else ""
        raise PackingError(f"--set {name}: {kind.__name__} has no such argument{hint}")
    for name, value in job.arguments.items():
        _check_type(name, value, defaults[name])
    options, ranks = job.options, int(os.environ.get("WORLD_SIZE", "1"))
    if job.batch_size % ranks:
        raise PackingError(f"--batch-size {job.batch_size} does not divide over {ranks} processes: pass a multiple")
    evaluates = {"eval_strategy": "steps", "eval_steps": job.eval_every} if job.held_out and job.eval_every else {}
    saves: dict[str, Any] = {}
    if job.save_every or job.keep_best:
        every = job.save_every or job.eval_every
        saves = {"save_strategy": "steps", "save_steps": every, "save_total_limit": job.keep_checkpoints}
    if job.keep_best or job.early_stopping:
        saves |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
        saves |= {"load_best_model_at_end": job.keep_best}
    if options.optim is not None:
        saves["optim"] = options.optim
    # transformers 5.23 renamed it, and warns under the old name
    renamed = "activation_checkpointing" in defaults
    settled = {
        **shared_arguments(options),
        "output_dir": str(folder),
        "per_device_train_batch_size": job.batch_size // ranks,
        "per_device_eval_batch_size": job.batch_size // ranks,
        "num_train_epochs": job.epochs,
        "max_steps": job.steps or -1,
        "learning_rate": options.lr,
        "lr_scheduler_type": options.decay,
        # transformers takes less than 1 for a share of the steps, and 1 for one step
        "warmup_steps": min(options.warmup, math.nextafter(1.0, 0.0)),
        "weight_decay": options.weight_decay,
        "bf16": options.dtype == "float32" and options.precision != "float32",
        "activation_checkpointing" if renamed else "gradient_checkpointing": job.gradient_checkpointing,
        "remove_unused_columns": True,
        "use_cpu": job.device == "cpu" or not torch.cuda.is_available(),
        **evaluates,
        **saves,
        **own,
    }
    with naming(f"--task {job.task}: {kind.__name__}", (TypeError, ValueError)):
        return kind(**(settled | dict(job.arguments)))


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raises PackingError for a text where a trainer's argument is a number or a switch; its class checks no types."""
    wanted = {bool: "true or false", int: "a number", float: "a number"}.get(type(default))
    if wanted is not None and isinstance(value, str) and name != "warmup_steps":
        raise PackingError(f"--set {name} is {value!r}: pass {wanted}")


def _with_images(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record with all its images in one column, after they were decoded."""
    turns = turns_of(record, _CHATS)
    if has_own_pictures(turns):
        raise LayoutError(f"{where} has images in its messages: put them into the column images, where TRL reads them")
    images = record.get("images")
    if images is None:
        images = [] if record.get("image") is None else [record["image"]]
    pictures_of({"images": images}, where)
    return {**{name: value for name, value in record.items() if name != "image"}, "images": list(images)}
