"""The torch trainers behind ``crosspack train --task``: a TaskJob goes in, a TaskResult comes out.

Records -> a ``datasets.Dataset``, or packed rows where they have images -> the task's own trainer (TRL's, or
transformers' with a head for the task) -> ``enable_packing`` -> an audit -> ``train()`` -> the model, written
unpatched. The loop, the loss and the checkpoints are the trainer's own.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from packing_core.errors import CapacityError, PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import Audit
from packing_core.training.tasks import TASKS, TaskJob, TaskResult
from torch_backend.auditing.model import verify
from torch_backend.auditing.trainer import audit_trainer
from torch_backend.collate import PackedCollator
from torch_backend.job import retrieval
from torch_backend.job.images import image_dataset, image_rows
from torch_backend.job.models import audit_of, load_model, naming, shared_arguments, with_adapters, write_model
from torch_backend.job.retrieval import RETRIEVAL
from torch_backend.job.train import device_name
from torch_backend.trainers.enable_packing import disable_packing, enable_packing

require("transformers", extra="hf")

import transformers  # noqa: E402
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

# task -> names in TRL of its trainer and of the trainer's arguments
_OF_TRL = {
    "dpo": ("DPOTrainer", "DPOConfig"),
    "kto": ("KTOTrainer", "KTOConfig"),
    "reward": ("RewardTrainer", "RewardConfig"),
    "grpo": ("GRPOTrainer", "GRPOConfig"),
}
_HEADS = {
    "classify": "AutoModelForSequenceClassification",
    "reward": "AutoModelForSequenceClassification",
    "mlm": "AutoModelForMaskedLM",
}
_ADAPTERS = {"classify": "SEQ_CLS", "reward": "SEQ_CLS"}  # peft's names of tasks; others train no head


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
    labels = _labels(job)
    if job.task in RETRIEVAL:
        model = retrieval.load(job)
        tokenizer = model.processor
    else:
        tokenizer = _tokenizer(job)
        model = _model(job, tokenizer, labels)
        if job.options.lora:
            model = with_adapters(model, job.options, _ADAPTERS.get(job.task, "CAUSAL_LM"))
    skipped: list[str] = []
    with TemporaryDirectory() as scratch, _of_the_trainer(job):
        trainer = _trainer(
            job,
            model,
            tokenizer,
            labels,
            skipped,
            folder=job.checkpoints if job.checkpoints and job.save_every else Path(scratch),
        )
        job.on_phase("patching and auditing it")
        audit = _packed(job, trainer)
        steps, seconds = _timed(job, trainer)
        result = TaskResult(
            steps=_steps(trainer),
            seconds=seconds,
            examples=steps * job.batch_size,
            audit=audit,
            device=device_name(trainer.args.device),
            skipped=skipped,
        )
    if job.task in RETRIEVAL:
        disable_packing(trainer)
    if job.output is not None and trainer.is_world_process_zero():
        if job.task in RETRIEVAL:
            retrieval.write(job, trainer.model)
            return result
        write_model(job, trainer.accelerator.unwrap_model(trainer.model))
        tokenizer.save_pretrained(job.output)
    return result


def _tokenizer(job: TaskJob) -> Any:
    """The tokenizer, or the processor of records with images; it pads with its EOS if it has nothing else.

    Raises:
        PackingError: it cannot be loaded.
    """
    what, auto = ("processor", "AutoProcessor") if job.images else ("tokenizer", "AutoTokenizer")
    with naming(f"{what} {job.tokenizer}"):
        loaded = getattr(transformers, auto).from_pretrained(job.tokenizer, trust_remote_code=job.trust_remote_code)
    if job.images and getattr(loaded, "image_processor", None) is None:
        raise PackingError(
            f"records have images, and {job.tokenizer} has no processor of images, only {type(loaded).__name__}: pass "
            "a vision-language model, or leave the images out of the records"
        )
    tokenizer = loaded.tokenizer if job.images else loaded
    if job.images and job.task == "grpo":
        tokenizer.padding_side = "left"  # TRL completes prompts as the processor pads them
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return loaded


def _labels(job: TaskJob) -> list[Any]:
    """The classes of the records, sorted; none for other tasks."""
    if job.task != "classify":
        return []
    labels = {record["label"] for record in [*job.records, *job.held_out]}
    kinds = {type(label).__name__ for label in labels}
    if not kinds <= {"int", "str", "bool"} or len(kinds) > 1:
        raise PackingError(
            f"--task classify: labels are {' and '.join(sorted(kinds))}: they must be all str or all int"
        )
    if len(labels) < 2:
        raise PackingError(
            f"--task classify: the only label is {next(iter(labels))!r}: pass records of two classes or more"
        )
    return sorted(labels)


def _model(job: TaskJob, tokenizer: Any, labels: Sequence[Any]) -> Any:
    """The model with the head of the task, in the dtype of its weights.

    Raises:
        PackingError: it cannot be loaded.
    """
    options: dict[str, Any] = {"num_labels": 1} if job.task == "reward" else {}
    if labels:
        options["id2label"] = {number: str(label) for number, label in enumerate(labels)}
        options["label2id"] = {name: number for number, name in options["id2label"].items()}
    plain = "AutoModelForImageTextToText" if job.images else "AutoModelForCausalLM"
    model = load_model(job, _HEADS.get(job.task, plain), **options)
    # a decoder's classifier finds the end of a document by it
    if not job.images and model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model


def _trainer(
    job: TaskJob, model: Any, tokenizer: Any, labels: Sequence[Any], skipped: list[str], *, folder: Path
) -> Any:
    """The trainer of the task, as its library builds it; ``skipped`` gets why records with images are left out."""
    sets = {"train_dataset": job.records, **({"eval_dataset": job.held_out} if job.held_out else {})}
    data: dict[str, Any]
    if job.images:
        job.on_phase("reading the images")
    if job.task in RETRIEVAL:
        data = retrieval.parts(job, model, skipped)
    elif job.task == "sft":
        data = {name: image_rows(job, records, model, tokenizer, skipped) for name, records in sets.items()}
    elif job.images:
        data = {name: image_dataset(job, records, skipped) for name, records in sets.items()}
    else:
        longest = _longest(model, tokenizer)
        data = {name: _dataset(job, records, tokenizer, labels, longest) for name, records in sets.items()}
    stopping = [EarlyStoppingCallback(job.early_stopping)] if job.early_stopping else []
    common: dict[str, Any] = {
        "model": model,
        "processing_class": tokenizer,
        "callbacks": [_StepLines(job.on_phase), *stopping],
        **data,
    }
    if job.task in _OF_TRL:
        trl = require("trl", extra="hf")
        kind, config = (getattr(trl, name) for name in _OF_TRL[job.task])
        rewards = {"reward_funcs": list(job.rewards)} if job.task == "grpo" else {}
        limit = _longest(model, tokenizer) if "overflow" in TASKS[job.task].reads and not job.images else None
        trainer = kind(args=_arguments(job, config, folder, limit), **rewards, **common)
        if limit is not None and "max_length" not in job.arguments:
            _fit(job, trainer, limit)
    elif job.task in RETRIEVAL:
        kind = "SentenceTransformer" if job.task == "embed" else "CrossEncoder"
        arguments = _arguments(job, getattr(retrieval.library(), f"{kind}TrainingArguments"), folder)
        if (
            data["train_dataset"].column_names[-1] in ("positive", "score")
            and arguments.per_device_train_batch_size < 2
        ):
            raise PackingError(
                f"--batch-size {job.batch_size} leaves a pair alone on its process, and the other pairs of a batch are "
                "what it is told apart from: pass at least 2 for each process, or records with a negative"
            )
        trainer = getattr(retrieval.library(), f"{kind}Trainer")(args=arguments, **common)
        if job.options.lora:
            retrieval.resumes_adapters(trainer)
    else:
        collators: dict[str, Callable[[], Any]] = {
            "sft": lambda: PackedCollator(model, processor=tokenizer),
            "mlm": lambda: transformers.DataCollatorForLanguageModeling(tokenizer),
            "classify": lambda: transformers.DataCollatorWithPadding(tokenizer),
        }
        collator = collators[job.task]()
        arguments = _arguments(job, transformers.TrainingArguments, folder)
        trainer = transformers.Trainer(args=arguments, data_collator=collator, **common)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _longest(model: Any, tokenizer: Any) -> int:
    """Returns the number of tokens of a text that both the model and its tokenizer take."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(tokenizer.model_max_length), positions or int(tokenizer.model_max_length))


def _dataset(
    job: TaskJob, records: Sequence[Mapping[str, Any]], tokenizer: Any, labels: Sequence[Any], longest: int
) -> Any:
    """The records as the trainer of the task reads them."""
    datasets = require("datasets", extra="hf")
    if not TASKS[job.task].rows:
        return datasets.Dataset.from_list([dict(record) for record in records])
    numbers = {label: number for number, label in enumerate(labels)}
    examples = []
    for record in records:
        ids = record.get("input_ids")
        example = {"input_ids": tokenizer(record["text"])["input_ids"] if ids is None else list(ids)}
        if labels:
            example["label"] = numbers[record["label"]]
        examples.append(example)
    return datasets.Dataset.from_list(examples)


def _fit(job: TaskJob, trainer: Any, longest: int) -> None:
    """Refuses answers that are longer than the model, prompt included, or drops them; TRL truncates.

    Raises:
        CapacityError: one is too long, and ``overflow`` is ``error``.
    """
    if job.overflow == "truncate":
        return

    def tokens(example: Mapping[str, Any]) -> int:
        answers = [len(ids) for name, ids in example.items() if name.endswith("_ids") and name != "prompt_ids"]
        return len(example.get("prompt_ids", ())) + max(answers)

    for name in ("train_dataset", "eval_dataset"):
        if (dataset := getattr(trainer, name)) is None:
            continue
        if job.overflow == "drop":
            setattr(trainer, name, dataset.filter(lambda example: tokens(example) <= longest))
            continue
        for number, example in enumerate(dataset):
            if (count := tokens(example)) > longest:
                raise CapacityError(
                    f"record {number} has an answer of {count:,} tokens with its prompt and the model takes "
                    f"{longest:,}: pass --overflow {'drop' if job.task == 'reward' else 'truncate or drop'}"
                )


def _arguments(job: TaskJob, kind: type[Any], folder: Path, longest: int | None = None) -> Any:
    """The trainer's arguments: those of the options, and of ``--set`` whatever else it has.

    Args:
        job: the task.
        kind: the class of the arguments.
        folder: where checkpoints go.
        longest: tokens of an example where the trainer truncates; None leaves its default.

    Raises:
        PackingError: its library refuses one.
    """
    fields_of_kind = {field.name for field in fields(kind)}
    for name in job.arguments.keys() - fields_of_kind:
        near = get_close_matches(name, fields_of_kind, n=1)
        hint = f": is it {near[0]}?" if near else ""
        raise PackingError(f"--set {name}: {kind.__name__} has no such argument{hint}")
    for name, value in job.arguments.items():
        _check_type(name, value, next(field for field in fields(kind) if field.name == name).default)
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
        # transformers 5.23 renamed it, and warns under the old name
        "activation_checkpointing" if "activation_checkpointing" in fields_of_kind else "gradient_checkpointing": (
            job.gradient_checkpointing
        ),
        "use_cpu": job.device == "cpu" or not torch.cuda.is_available(),
        "remove_unused_columns": job.task not in (*RETRIEVAL, "sft"),
        **evaluates,
        **saves,
    }
    if job.task == "rerank":  # DDP's search for them does not find what the library's outputs use
        settled["ddp_find_unused_parameters"] = False
    if longest is not None:
        settled["max_length"] = longest if job.overflow == "truncate" else None
    with naming(f"--task {job.task}: {kind.__name__}", (TypeError, ValueError)):
        return kind(**(settled | dict(job.arguments)))


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raises PackingError for a text where a trainer's argument is a number or a switch; its class checks no types."""
    wanted = {bool: "true or false", int: "a number", float: "a number"}.get(type(default))
    if wanted is not None and isinstance(value, str) and name != "warmup_steps":
        raise PackingError(f"--set {name} is {value!r}: pass {wanted}")


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


def _packed(job: TaskJob, trainer: Any) -> Audit:
    """Packs the trainer in place; returns the verdict on it."""
    precision: Any = "float8" if job.options.precision == "float8" else None
    options: Any = {"implementation": job.attention, "verify": False, "precision": precision}
    if job.task in _OF_TRL or job.task == "sft":  # their batches, or their rows, are there
        enable_packing(trainer, **options)
        report: Any = audit_trainer(trainer)
    elif job.task in RETRIEVAL:
        report = verify(trainer.model.transformers_model, job.attention)
        enable_packing(trainer, **options)
    else:
        report = verify(trainer.model, job.attention)
        enable_packing(trainer, capacity=job.capacity, overflow=job.overflow, **options)
    return audit_of(report)


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
