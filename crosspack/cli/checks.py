"""Refuses ``crosspack train`` before any work: contradictory options, and folders in use."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Mapping
from importlib.util import find_spec
from pathlib import Path

import typer

from crosspack.cli import launch
from crosspack.cli.models import check_name
from crosspack.cli.outputs import check
from crosspack.cli.records import weighted
from crosspack.cli.trainoptions import TrainOptions
from packing_core.errors import MissingExtraError, PackingError, UnsupportedError
from packing_core.training.job import ZERO
from packing_core.training.options import ADAMW, RESUMABLE

# axes of --mesh over which rows are spread, and those over which devices share a row
ROW_AXES, SHARED_AXES = ("data", "fsdp"), ("tensor", "context")
# options that the task of --task does not read, and the way out
_IN_PLACE = {
    "--batch-size": "pass --rows-per-step in its place",
    "--reward": "pass --task grpo too",
    "--workers": "pass --set dataloader_num_workers=N: workers of the loader make batches",
}


def check_output(options: TrainOptions, *, resume: bool, run: str | None) -> None:
    """Refuse contradictory options and any folder that somebody still needs, unless it holds the result of ``run``."""
    if options.compare and (resume or options.save_every):
        raise PackingError("--compare measures whole runs: pass it without --resume and --save-every")
    if options.output is None:
        if resume or options.save_every:
            raise PackingError("--resume and --save-every need --output, the folder of the run")
        return
    if not resume and launch.rank() == 0:  # which may write there by the time that another looks
        check(options.output, overwrite=options.overwrite, ways="--resume, --overwrite", run=run)


def check_read(context: typer.Context, options: TrainOptions, unread: Container[str]) -> None:
    """Refuse options that were passed and that the task does not read.

    An option of a ``--config`` file counts as passed unless it has its default, because a ``run.yaml`` holds them all.

    Raises:
        UnsupportedError: one has no effect on the task.
    """
    for parameter in context.command.params:
        name, option = str(parameter.name), parameter.opts[0]
        if name not in unread:
            continue
        source = context.get_parameter_source(name)
        named = source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
        if named or getattr(options, name) != parameter.default:
            raise UnsupportedError(f"--task {options.task} has no {option}: {_IN_PLACE.get(option, 'leave it out')}")


def check_rows(options: TrainOptions) -> None:
    """Refuse options of ``--task sft`` without images that do not go together."""
    ranks = launch.world_size() if launch.world_size() > 1 else options.nproc
    mesh = read_mesh(options.mesh)
    if options.compare and ranks > 1:
        raise PackingError("--compare measures one process: pass it without --nproc and torchrun")
    if options.compare and math.prod(mesh.values()) > 1:
        raise PackingError("--compare measures one device: pass it without --mesh")
    if options.strategy != "ddp" and ranks == 1:
        raise PackingError(
            f"--strategy {options.strategy} shards weights over processes: pass --nproc, or start it with torchrun"
        )
    if options.strategy in ZERO:
        _check_zero(options)
    options.row_rule()  # raises where its options contradict each other
    if options.equal_cost:
        options.check_step(options.rows_per_step)
    _check_context(options, ranks)
    _check_rows(options.rows_per_step, ranks, options.context_parallel, mesh)
    if options.compile and (options.compare or options.deterministic):
        other = "--compare" if options.compare else "--deterministic"
        raise PackingError(f"{other} runs no compiled layers: leave --compile out")


def check_pipes(options: TrainOptions) -> None:
    """Raises PackingError for a pipe as the data of several processes, of which one alone could read it."""
    if max(options.nproc, launch.world_size()) == 1:
        return
    for option, data in (("--data", options.data), ("--eval-data", options.eval_data)):
        for path, _ in (weighted(text, option) for text in data or ()):
            if os.path.exists(path) and Path(path).is_fifo():
                raise PackingError(
                    f"{option} {path} is a pipe, which only one process can read: write what it brings to a file, or "
                    "train without --nproc and torchrun"
                )


def check_examples(options: TrainOptions) -> None:
    """Refuse options of another task, or of records with images, that do not go together."""
    name = options.task
    if options.model is None or Path(options.model).is_file():
        raise PackingError(f"--task {name} trains a model that is there: pass --model, a folder or a hub name")
    check_name("--model", options.model)
    check_name("--tokenizer", options.tokenizer)
    if (name == "grpo") != bool(options.reward):
        raise PackingError(
            "--task grpo needs --reward FILE.py:FUNCTION, which scores completions"
            if name == "grpo"
            else f"--reward scores the completions of --task grpo: leave it out of --task {name}"
        )
    if options.overflow not in ("error", "truncate", "drop"):
        raise PackingError(f"--task {name} keeps documents whole: pass --overflow truncate or drop")
    if name == "reward" and options.overflow == "truncate":
        raise PackingError("--task reward scores whole answers: pass --overflow drop, or shorten them in the data")


def _check_rows(rows: int, ranks: int, context_parallel: int, mesh: Mapping[str, int]) -> None:
    """Refuse steps of fewer rows than there are processes, or devices, that each take some of them."""
    groups = ranks // context_parallel
    processes = f"{ranks} processes" if groups == ranks else f"{groups} groups of {context_parallel} processes"
    apart = math.prod(size for name, size in mesh.items() if name in ROW_AXES)
    devices = f"{apart} devices" if apart == math.prod(mesh.values()) else f"{apart} groups of devices"
    for needed, who in ((groups, processes), (apart, devices)):
        if rows < needed:
            raise PackingError(
                f"--rows-per-step {rows} leaves some of {who} without a row in every step: pass {needed} or more"
            )


def check_kept(options: TrainOptions) -> None:
    """Refuse to merge, to keep, or to stop by, what a run of any task does not make."""
    if options.merge_lora and not options.lora:
        raise PackingError("--merge-lora adds adapters to the weights, and none are trained: pass --lora RANK too")
    if options.merge_lora and options.strategy != "ddp":
        raise PackingError(f"--merge-lora needs whole weights, and --strategy {options.strategy} shards them")
    if not options.eval_data and (options.eval_every or options.eval_split):
        raise PackingError("--eval-every and --eval-split need --eval-data, the documents to evaluate on")
    for option, is_used in (("--keep-best", options.keep_best), ("--early-stopping", options.early_stopping > 0)):
        if is_used and not (options.eval_data and options.eval_every):
            raise PackingError(f"{option} goes by evaluations: pass --eval-data and --eval-every")
        if is_used and options.compare:
            raise PackingError(f"--compare measures whole runs: leave {option} out")
    if options.keep_best and options.output is None:
        raise PackingError("--keep-best needs --output, the folder that checkpoints go to")
    if options.keep_checkpoints > 1 and not options.save_every:
        raise PackingError(f"--keep-checkpoints {options.keep_checkpoints} needs --save-every, which makes them")
    if options.strategy != "ddp" and (options.keep_best or options.sample):
        option = "--keep-best" if options.keep_best else "--sample"
        raise PackingError(f"{option} needs whole weights, and --strategy {options.strategy} shards them")


def check_optimizer(options: TrainOptions, name: str | None) -> None:
    """Refuse an optimizer whose states cannot be saved or sharded, where they would have to be."""
    if name is None or name in ADAMW:
        return
    if options.strategy != "ddp":
        raise PackingError(f"--strategy {options.strategy} shards the states of AdamW: leave --optim {name} out")
    if name not in RESUMABLE and (options.save_every or options.resume or options.keep_best):
        raise PackingError(
            f"--optim {name} keeps states that checkpoints do not hold: leave --save-every, --keep-best and --resume "
            f"out, or pass one of {', '.join(RESUMABLE)}"
        )


def _check_context(options: TrainOptions, ranks: int) -> None:
    """Refuse groups of processes that do not divide them, or that DeepSpeed would not know of."""
    size = options.context_parallel
    if ranks % size:
        raise PackingError(
            f"--context-parallel {size} does not divide {ranks} process{'es' * (ranks > 1)}: every process belongs to "
            f"one group, so pass --nproc {size} or a multiple of it"
        )
    if size > 1 and options.strategy in ZERO:
        raise PackingError(
            f"--context-parallel {size} cuts documents over processes, which --strategy {options.strategy} does not "
            "know of: pass --strategy fsdp"
        )


def _check_zero(options: TrainOptions) -> None:
    """Refuse what DeepSpeed's ZeRO does in no way that one process does."""
    strategy = f"--strategy {options.strategy}"
    if find_spec("deepspeed") is None:
        raise MissingExtraError(
            f"{strategy}: DeepSpeed is not installed: pip install deepspeed, or pass --strategy fsdp"
        )
    if options.save_every or options.resume:
        raise PackingError(
            f"{strategy} writes no checkpoints, because DeepSpeed's hold pickles and serve one number of processes: "
            "leave --save-every and --resume out, or pass --strategy fsdp"
        )
    precision = options.precision or options.dtype
    if options.dtype == "bfloat16" and not options.master_weights:
        raise PackingError(f"{strategy} keeps float32 copies of bfloat16 weights: pass --master-weights too")
    if precision != options.dtype:
        raise PackingError(
            f"{strategy} computes in the dtype of the weights: pass --dtype bfloat16 --master-weights, or leave "
            "--precision out"
        )


def read_mesh(text: str | None) -> dict[str, int]:
    """``data=2,fsdp=4`` as axis -> devices; None as no axis.

    Raises:
        PackingError: it says something else.
    """
    if text is None:
        return {}
    parts = [part.strip().partition("=") for part in text.split(",")]
    axes = {name: int(size) for name, _, size in parts if size.isdecimal()}
    if len(axes) != len(parts) or not axes.keys() <= {*ROW_AXES, *SHARED_AXES} or min(axes.values()) < 1:
        raise PackingError(
            f"--mesh {text}: pass the devices of each axis, such as data=2 or fsdp=4,tensor=2: rows are spread over "
            "data and fsdp, weights are cut over fsdp, heads and MLPs over tensor, the tokens of a row over context"
        )
    return axes


def used_options(options: TrainOptions) -> list[str]:
    """The options in use that not every backend has."""
    ranks = max(options.nproc, launch.world_size())
    used = {
        "--dtype bfloat16": options.dtype == "bfloat16",
        "--precision float8": options.precision == "float8",
        "--lora": options.lora > 0,
        "--lora-alpha, --lora-dropout, --lora-targets or --merge-lora": bool(
            options.lora_alpha or options.lora_dropout or options.lora_targets or options.merge_lora
        ),
        "--eval-data": bool(options.eval_data),
        "--compile": options.compile is not None,
        "--nproc or torchrun": ranks > 1,
        "--context-parallel": options.context_parallel > 1,
        "--mesh": options.mesh is not None,
        "--optim, --neftune-alpha or --set": bool(options.set or options.optim) or options.neftune_alpha is not None,
        "--keep-best, --early-stopping or --sample": bool(
            options.keep_best or options.early_stopping or options.sample
        ),
    }
    return [option for option, is_used in used.items() if is_used]
