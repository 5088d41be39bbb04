"""Starts a script on several ranks of one machine, and ends every process of it after a limit of seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from tests.processes import LIMIT, run

ROOT = Path(__file__).parents[2]


def torchrun(script: str, *arguments: str, ranks: int = 2, limit: float = LIMIT) -> None:
    """Run ``script`` of this folder with ``torchrun``, as :func:`on_ranks` does."""
    on_ranks(str(Path(__file__).with_name(script)), *arguments, ranks=ranks, limit=limit)


def on_ranks(*command: str, ranks: int = 2, limit: float = LIMIT) -> str:
    """Run what follows the options of ``torchrun``, with one thread for each rank, and return what it printed.

    Raises:
        AssertionError: it failed, with the end of what it wrote, or ran for more than ``limit`` seconds.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    result = run([*launch, *command], env=environment, limit=limit)
    text = result.stdout + result.stderr
    assert result.returncode == 0, f"{Path(command[0]).name} ended with {result.returncode}: {text[-3000:]}"
    return text


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors gathered from all ranks, under the names of the model that no wrapper is around."""
    return {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): (
            x.full_tensor() if isinstance(x, DTensor) else x
        ).clone()
        for name, x in found.items()
    }


def weights_of(model: Any) -> dict[str, Tensor]:
    """The whole weights of a model, under the names of the model that no wrapper is around."""
    with FSDP1.summon_full_params(model) if isinstance(model, FSDP1) else nullcontext():
        return whole({name: p.detach() for name, p in model.named_parameters()})


def run_cases(target: Path, cases: Iterable[str], run: Callable[[str], Any]) -> None:
    """Run every case on all ranks, and save the first rank's results, or the texts of errors, by case."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    results: dict[str, Any] = {}
    for name in cases:
        try:
            results[name] = run(name)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        torch.save(results, target)
    leave()


def assert_same_loss(many: Any, one: dict[str, Any]) -> None:
    """The loss of several ranks and their averaged gradients are those of one process, to 1e-6 of the largest."""
    assert not isinstance(many, str), many  # the text of an error
    assert abs(many["loss"] - one["loss"]) <= 1e-6 * abs(one["loss"])
    assert many["gradients"].keys() == one["gradients"].keys()
    sizes = [float(gradient.abs().max()) for gradient in one["gradients"].values()]
    assert max(sizes) > 1e-3
    for name, gradient in one["gradients"].items():
        assert float((many["gradients"][name] - gradient).abs().max()) <= 1e-6 * max(1.0, *sizes), name


def leave() -> None:
    """End a rank. No rank leaves before the others are done, and none waits for gloo's threads, which can hang."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
