"""Refuses optimizers, schedulers, numbers and ranks with which a step would stop, or train something else."""

from __future__ import annotations

import inspect
import logging
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from packing_core.errors import PackingError, UnsupportedError

logger = logging.getLogger(__name__)
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def check_optimizer(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Check that ``optimizer.step()`` and ``scheduler.step()`` train this model.

    Args:
        model: what the step will train.
        optimizer: a torch optimizer, or a wrapper with one as ``optimizer``, as accelerate makes.
        scheduler: None, or what has a ``step()``; a wrapper has the one it wraps as ``scheduler``.

    Raises:
        UnsupportedError: nothing of the model is trained, the optimizer holds none of what is, one of the two steps
            needs an argument, or the scheduler is another optimizer's.
    """
    check_trainable(model)
    ours = {id(p) for p in model.parameters() if p.requires_grad}
    inner = _innermost(optimizer, "optimizer")
    if not any(id(p) in ours for group in inner.param_groups for p in group["params"]):
        raise UnsupportedError(
            f"the optimizer holds no trained parameter of this {type(model).__name__}, so its steps would not train "
            "it: build it from model.parameters() after wrapping, sharding or adding adapters"
        )
    if needed := _needed(type(inner)):
        raise UnsupportedError(
            f"{type(inner).__name__}.step needs {needed}, with which it would compute losses itself, and a training "
            "step calls optimizer.step() once: take an optimizer that steps from gradients alone, AdamW for example"
        )
    if scheduler is None:
        return
    bare = _innermost(scheduler, "scheduler")
    if needed := _needed(type(bare)):
        raise UnsupportedError(
            f"{type(bare).__name__}.step needs {needed}, and a training step calls scheduler.step(): leave it out of "
            "make_train_step, and call it where the value is known, for example "
            'scheduler.step(float(step.evaluate(batches)["loss"]))'
        )
    if _innermost(getattr(bare, "optimizer", inner), "optimizer") is not inner:
        raise UnsupportedError(
            f"the {type(bare).__name__} belongs to another optimizer, so the learning rate of this one would never "
            "change: make it of the optimizer that is passed here"
        )


def check_numbers(model: nn.Module, max_grad_norm: Any, autocast: Any) -> None:
    """Check that gradients keep their direction when they are clipped, and small ones their digits.

    Raises:
        PackingError: ``max_grad_norm`` is no number above 0, or ``autocast`` no dtype that torch.autocast takes.
        UnsupportedError: gradients are computed in float16, which needs a scaler.
    """
    if max_grad_norm is not None and not (isinstance(max_grad_norm, Real) and float(max_grad_norm) > 0):
        raise PackingError(f"max_grad_norm is {max_grad_norm!r}: pass a norm above 0, or None, which clips nothing")
    trained = torch.float16 in {p.dtype for p in model.parameters() if p.requires_grad}
    if autocast is torch.float16 or trained:
        raise UnsupportedError(
            f"{'trained weights in float16' if trained else 'autocast=torch.float16'} needs a loss scaler, or small "
            "gradients become 0, and make_train_step has none: use bfloat16, or a Trainer with fp16=True"
        )
    if autocast not in (None, torch.bfloat16):
        raise PackingError(f"autocast={autocast}: pass torch.bfloat16, or None for the dtype of the weights")


def check_trainable(model: nn.Module) -> None:
    """Check that the model has something to train.

    Raises:
        UnsupportedError: every parameter is frozen.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedError(
            f"every parameter of {type(model).__name__} is frozen, so there is nothing to train: set requires_grad on "
            "those to train, or add adapters, before make_train_step"
        )


def check_ranks(cut_over: Any, counted_over: Any, outer: nn.Module | None) -> None:
    """Check that targets and gradients are added over all ranks that hold parts of the same documents.

    Args:
        cut_over: the process group over which documents are cut.
        counted_over: the group over which the step adds up losses and targets; None for the default group.
        outer: the outermost module that reduces gradients; None without one.

    Raises:
        UnsupportedError: one of the two sums leaves out ranks.
    """
    parts = set(dist.get_process_group_ranks(cut_over))
    counted = set(dist.get_process_group_ranks(counted_over))
    if not parts <= counted:
        raise UnsupportedError(
            f"targets would be counted on ranks {_listed(counted)}, and documents are cut over ranks "
            f"{_listed(parts)}: pass the group of all ranks that train, or leave group out"
        )
    if outer is not None and (reduced := _reduced_over(outer)) is not None and not parts <= reduced:
        raise UnsupportedError(
            f"{type(outer).__name__} reduces gradients over ranks {_listed(reduced)}, and documents are cut over ranks "
            f"{_listed(parts)}, each of which has a part of the gradients: wrap the model over all ranks of the mesh, "
            'not over mesh["dp"] alone'
        )


def warn_of_other_ranks(counted_over: Any, outer: nn.Module) -> None:
    """Logs a warning where targets are counted over other ranks than gradients are reduced over.

    That is right where ranks have the same documents, as under tensor parallelism. Else gradients are divided by the
    number of targets of other documents, or are a mean of means.
    """
    reduced, counted = _reduced_over(outer), set(dist.get_process_group_ranks(counted_over))
    if reduced is not None and reduced != counted:
        logger.warning(
            "%s reduces gradients over ranks %s, and targets are counted over ranks %s. If all of them have different "
            "documents, pass make_train_step(group=...), the ranks that gradients are reduced over",
            type(outer).__name__,
            _listed(reduced),
            _listed(counted),
        )


def _reduced_over(outer: nn.Module) -> set[int] | None:
    """Returns the ranks over which a module reduces gradients; None where it does not say."""
    if isinstance(outer, DistributedDataParallel):
        return set(dist.get_process_group_ranks(outer.process_group))
    if isinstance(outer, FullyShardedDataParallel):
        sharded = dist.get_process_group_ranks(outer.process_group)
        if outer.sharding_strategy not in _HYBRID:  # torch leaves hybrid sharding where groups have one rank
            return set(sharded)
        # a mesh of two dimensions, whose row and column through this rank are known
        replicated = dist.get_process_group_ranks(outer._inter_node_pg)
        return {one + other - dist.get_rank() for one in sharded for other in replicated}
    if not isinstance(outer, FSDPModule):
        return None
    meshes: list[list[int]] = [
        p.device_mesh.mesh.flatten().tolist() for p in outer.parameters() if isinstance(p, DTensor)
    ]
    widest: list[int] = max(meshes, key=len, default=[])
    return set(widest) or None


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _innermost(wrapper: Any, name: str) -> Any:
    """Returns what stands behind wrappers that hold the next one as an attribute."""
    while name in getattr(wrapper, "__dict__", {}):
        wrapper = getattr(wrapper, name)
    return wrapper


def _needed(kind: type) -> str:
    """Returns the names of arguments without which ``step`` of an object of this kind cannot be called."""
    _, *parameters = inspect.signature(kind.step).parameters.values()  # type: ignore[attr-defined]
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return ", ".join(p.name for p in parameters if p.default is p.empty and p.kind not in variable)
