"""Refuses ``crosspack train`` before any work: contradictory options, and folders in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crosspack.cli import launch
from crosspack.cli.outputs import check
from packing_core.errors import MissingExtraError, PackingError
from packing_core.training.job import ZERO
from packing_core.training.options import ADAMW, RESUMABLE

# axes of --mesh over which rows are spread, and those over which devices share a row
ROW_AXES, SHARED_AXES = ("data", "fsdp"), ("tensor", "context")


def check_output(
    output: Path | None, *, compare: bool, overwrite: bool, resume: bool, save_every: int, run: str | None
) -> None:
    """Refuse contradictory options and any folder that somebody still needs, unless it holds the result of ``run``."""
    if compare and (resume or save_every):
        raise PackingError("--compare measures whole runs: pass it without --resume and --save-every")
    if output is None:
        if resume or save_every:
            raise PackingError("--resume and --save-every need --output, the folder of the run")
        return
    if not resume and launch.rank() == 0:  # which may write there by the time that another looks
        check(output, overwrite=overwrite, ways="--resume, --overwrite", run=run)


def check_contradictions(given: Mapping[str, Any]) -> None:
    """Refuse options that do not go together; ``given`` has the parameters of the command."""
    if given["reward"]:
        raise PackingError("--reward goes to the trainer of another task: pass --task too")
    ranks = launch.world_size() if launch.world_size() > 1 else given["nproc"]
    mesh = read_mesh(given["mesh"])
    if given["compare"]:
        _check_compare(ranks, mesh)
    if given["strategy"] != "ddp" and ranks == 1:
        raise PackingError(
            f"--strategy {given['strategy']} shards weights over processes: pass --nproc, or start it with torchrun"
        )
    if given["strategy"] in ZERO:
        _check_zero(given)
    check_order(given)
    _check_context(given, ranks)
    _check_rows(given["rows_per_step"], ranks, given["context_parallel"], mesh)
    if given["merge_lora"]:
        _check_merged(given)
    if given["compile"] and (given["compare"] or given["deterministic"]):
        other = "--compare" if given["compare"] else "--deterministic"
        raise PackingError(f"{other} runs no compiled layers: leave --compile out")
    if not given["eval_data"] and (given["eval_every"] or given["eval_split"]):
        raise PackingError("--eval-every and --eval-split need --eval-data, the documents to evaluate on")
    check_keeping(given)
    _check_optimizer(given)


def _check_compare(ranks: int, mesh: Mapping[str, int]) -> None:
    """Refuse to compare runs on more than one device."""
    if ranks > 1:
        raise PackingError("--compare measures one process: pass it without --nproc and torchrun")
    if math.prod(mesh.values()) > 1:
        raise PackingError("--compare measures one device: pass it without --mesh")


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


def _check_merged(given: Mapping[str, Any]) -> None:
    """Refuse to merge adapters that are not trained, or into weights that are not whole."""
    if not given["lora"]:
        raise PackingError("--merge-lora adds adapters to the weights, and none are trained: pass --lora RANK too")
    if given["strategy"] != "ddp":
        raise PackingError(f"--merge-lora needs whole weights, and --strategy {given['strategy']} shards them")


def check_keeping(given: Mapping[str, Any]) -> None:
    """Refuse to keep, or to stop by, what a run does not make."""
    chosen = {
        "--keep-best": given["keep_best"],
        "--early-stopping": given["early_stopping"] > 0,
    }
    for option in (option for option, is_used in chosen.items() if is_used):
        if not given["eval_data"] or not given["eval_every"]:
            raise PackingError(f"{option} goes by evaluations: pass --eval-data and --eval-every")
        if given["compare"]:
            raise PackingError(f"--compare measures whole runs: leave {option} out")
    if given["keep_best"] and given["output"] is None:
        raise PackingError("--keep-best needs --output, the folder that checkpoints go to")
    if given["keep_checkpoints"] > 1 and not given["save_every"]:
        raise PackingError(f"--keep-checkpoints {given['keep_checkpoints']} needs --save-every, which makes them")
    sharded = given["strategy"] != "ddp"
    if sharded and (given["keep_best"] or given["sample"]):
        option = "--keep-best" if given["keep_best"] else "--sample"
        raise PackingError(f"{option} needs whole weights, and --strategy {given['strategy']} shards them")


def _check_optimizer(given: Mapping[str, Any]) -> None:
    """Refuse optimizers whose states cannot be saved or sharded, where they would have to be."""
    name = given["optim"]
    if name is None or name in ADAMW:
        return
    if given["strategy"] != "ddp":
        raise PackingError(f"--strategy {given['strategy']} shards the states of AdamW: leave --optim {name} out")
    if name not in RESUMABLE and (given["save_every"] or given["resume"] or given["keep_best"]):
        raise PackingError(
            f"--optim {name} keeps states that checkpoints do not hold: leave --save-every, --keep-best and --resume "
            f"out, or pass one of {', '.join(RESUMABLE)}"
        )


def check_order(given: Mapping[str, Any]) -> None:
    """Refuse an order of training without its column or of rows packed by length, and steps of equal cost beside it."""
    order, column = given["order"], given["order_by"]
    if order in ("sorted", "grouped") and column is None:
        raise PackingError(f"--order {order} needs --order-by, the column of the records to order by")
    if order in ("random", "curriculum") and column is not None:
        raise PackingError(f"--order-by {column} has no effect under --order {order}: pass --order sorted or grouped")
    if order != "random" and given["packing"] != "mixed":
        raise PackingError(f"--order {order} packs mixed rows: leave --packing {given['packing']} out")
    if given["equal_cost"]:
        for option, value, own in (("order", order, "random"), ("packing", given["packing"], "mixed")):
            if value != own:
                raise PackingError(
                    f"--equal-cost chooses the documents of a step by cost: leave --{option} {value} out"
                )
        if given["rows_per_step"] == 1:
            raise PackingError("--equal-cost evens the rows of a step, and --rows-per-step 1 gives it one: pass more")


def check_steps(equal_cost: bool, rows_per_step: int | None) -> None:
    """Refuse packed rows of equal cost without the number of rows of a step, and that number without them."""
    if equal_cost and rows_per_step is None:
        raise PackingError("--equal-cost needs --rows-per-step, how many rows of the files are trained together")
    if rows_per_step is not None and not equal_cost:
        raise PackingError(f"--rows-per-step {rows_per_step} has no effect without --equal-cost: pass both or neither")


def _check_context(given: Mapping[str, Any], ranks: int) -> None:
    """Refuse groups of processes that do not divide them, or that DeepSpeed would not know of."""
    size = given["context_parallel"]
    if ranks % size:
        raise PackingError(
            f"--context-parallel {size} does not divide {ranks} process{'es' * (ranks > 1)}: every process belongs to "
            f"one group, so pass --nproc {size} or a multiple of it"
        )
    if size > 1 and given["strategy"] in ZERO:
        raise PackingError(
            f"--context-parallel {size} cuts documents over processes, which --strategy {given['strategy']} does not "
            "know of: pass --strategy fsdp"
        )


def _check_zero(given: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed's ZeRO does in no way that one process does."""
    strategy = f"--strategy {given['strategy']}"
    if find_spec("deepspeed") is None:
        raise MissingExtraError(
            f"{strategy}: DeepSpeed is not installed: pip install deepspeed, or pass --strategy fsdp"
        )
    if given["save_every"] or given["resume"]:
        raise PackingError(
            f"{strategy} writes no checkpoints, because DeepSpeed's hold pickles and serve one number of processes: "
            "leave --save-every and --resume out, or pass --strategy fsdp"
        )
    precision = given["precision"] or given["dtype"]
    if given["dtype"] == "bfloat16" and not given["master_weights"]:
        raise PackingError(f"{strategy} keeps float32 copies of bfloat16 weights: pass --master-weights too")
    if given["dtype"] == "float32" and precision == "bfloat16":
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


def used_options(given: Mapping[str, Any]) -> list[str]:
    """The options in use that not every backend has."""
    ranks = max(given["nproc"], launch.world_size())
    used = {
        "--dtype bfloat16": given["dtype"] == "bfloat16",
        "--lora": given["lora"] > 0,
        "--lora-alpha, --lora-dropout, --lora-targets or --merge-lora": any(
            given[name] for name in ("lora_alpha", "lora_dropout", "lora_targets", "merge_lora")
        ),
        "--eval-data": bool(given["eval_data"]),
        "--compile": given["compile"] is not None,
        "--nproc or torchrun": ranks > 1,
        "--context-parallel": given["context_parallel"] > 1,
        "--mesh": given["mesh"] is not None,
        "--optim, --neftune-alpha or --set": bool(given["set"] or given["optim"]) or given["neftune_alpha"] is not None,
        "--keep-best, --early-stopping or --sample": bool(
            given["keep_best"] or given["early_stopping"] or given["sample"]
        ),
    }
    return [option for option, is_used in used.items() if is_used]
