"""Run by ``torchrun`` in test_ranks_on_gpu: steps of ranks that hold unequal shares, by NCCL, or by gloo on the CPU.

Arguments: the family of the model, and the file to write to. Rank 0 writes metrics and weights by case. In the cases of
context parallelism one row of all documents is cut over the ranks.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch as mocked

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from packing_core import pack
from packing_core.batches.dataset import with_empty_row
from packing_core.training.timing import Clock
from tests.torch_backend.models import CAPACITY, documents, tiny
from tests.torch_backend.torchrun import leave, weights_of
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.context_parallel import attention
from torch_backend.job.ranks import Process, Ranks, shard

Model = Any
# Lengths that each pair of ranks holds, step by step: unequal shares, a rank without a target, one without documents.
STEPS = 2 * [((5, 19, 33, 7), (40,)), ((9, 30), (1, 1, 1)), ((3, 11, 21), ()), ((25, 2), (8, 14, 4))]
FAMILIES = ("qwen3", "gpt_oss", "qwen3_5_text", "recurrent_gemma")
# How weights or documents are cut; whether layers are compiled and, but for cut documents, recorded, or neither; and a
# level of memory, at which all pieces of a rank run at once, as long ones do.
CASES: dict[str, tuple[str, bool, Literal["attention", "full"] | None]] = {
    f"{strategy}, {'fast' if fast else 'plain'}": (strategy, fast, None)
    for strategy in ("ddp", "fsdp", "context")
    for fast in (True, False)
}
CASES["context, fast, layers recomputed"] = ("context", True, "full")
CASES["context, fast, layers but attention recomputed"] = ("context", True, "attention")


def held(step: int, rank: int) -> list[Tensor]:
    return documents(STEPS[step][rank % 2], seed=10 * step + rank)


def batch(docs: list[Tensor], model: Model) -> dict[str, Any]:
    """One row of the documents; a row of padding if there are none."""
    numbers = [document.numpy() for document in docs or documents((2,))]
    packed = pack(numbers, max(2 * CAPACITY, sum(map(len, numbers))), seed=None)
    return PackedCollator(model)(packed if docs else with_empty_row(packed)[1:])


def train(model: Model, shares: list[list[list[Tensor]]], fast: bool = True, memory: Any = None) -> dict[str, Any]:
    """Steps of gradient descent; ``shares`` has the microbatches of each step, as documents."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    choice: Any = "auto" if fast else False
    step = make_train_step(model, optimizer, max_grad_norm=0.5, compile=choice, capture=choice, memory=memory)
    metrics = [step([batch(docs, getattr(model, "module", model)) for docs in microbatches]) for microbatches in shares]
    found = weights_of(model)
    return {
        "metrics": [{name: float(x) for name, x in each.items()} for each in metrics],
        "weights": {name: weight.cpu() for name, weight in found.items()},
        "graph": step.parts["graph"],
    }


def main(family: str, target: Path) -> None:
    ranks = Ranks.from_environment()
    device = torch.device("cuda", ranks.local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found: dict[str, Any] = {}
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    for name, (strategy, fast, memory) in CASES.items():
        cut = strategy == "context"
        model = patch(tiny(family).to(device), verify=False, mesh=mesh if cut else None)
        if strategy == "fsdp":
            shard(model, Process(device, ranks, Clock(1)))
        else:
            model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        every = [[held(step, rank) for rank in range(dist.get_world_size())] for step in range(len(STEPS))]
        mine = [[list(chain(*shares))] if cut else [shares[ranks.rank]] for shares in every]
        try:
            at_once = mocked.object(attention, "runs_at_once", lambda layout: layout.continuing is not None)
            with at_once if memory else nullcontext():
                found[name] = train(model, mine, fast, memory)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    if ranks.rank == 0:
        torch.save(found, target)
    leave()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main(sys.argv[1], Path(sys.argv[2]))
