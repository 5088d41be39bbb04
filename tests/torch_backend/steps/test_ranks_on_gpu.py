"""GPUs and NCCL: ranks of unequal shares, without a target and without a document take the steps of one process.

On two GPUs, and on four where they are; by DDP, by FSDP2, and by context parallelism, for which one row of all
documents is cut over the ranks.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from itertools import chain, product
from typing import Any, Literal
from unittest.mock import patch as mocked

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from packing_core import pack
from packing_core.batches.dataset import with_empty_row
from packing_core.training.timing import Clock
from tests.torch_backend.models import CAPACITY, documents, tiny
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.wrappers import Model, weights_of
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.context_parallel import rank_attention
from torch_backend.job.ranks import Process, Ranks, shard

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

RANKS = (2, 4)
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


def on_rank(family: str, case: str) -> dict[str, Any]:
    ranks, (strategy, fast, memory) = Ranks.from_environment(), CASES[case]
    device = torch.device("cuda", ranks.local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
    cut, world = strategy == "context", dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",)) if cut else None
    model = patch(tiny(family).to(device), verify=False, mesh=mesh)
    if strategy == "fsdp":
        shard(model, Process(device, ranks, Clock(1)))
    else:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    every = [[held(step, rank) for rank in range(world)] for step in range(len(STEPS))]
    mine = [[list(chain(*shares))] if cut else [shares[ranks.rank]] for shares in every]
    at_once = mocked.object(rank_attention, "runs_at_once", lambda layout: layout.continuing is not None)
    with at_once if memory else nullcontext():
        return train(model, mine, fast, memory)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("family", "ranks"), product(FAMILIES, RANKS))
def test_ranks_take_the_steps_of_one_process(family: str, ranks: int, case: str) -> None:
    """As close to one process in float64 as 1e-5, or as four times what one in float32 is, which steps amplify."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    strategy, fast, _ = CASES[case]
    found = on_ranks(on_rank, family, case, ranks=ranks, backend="nccl", limit=220)  # all ranks compile the kernels
    if "ranks exchange only" not in found["graph"]:  # what else runs on the machine decides that
        assert (found["graph"] == "CUDA graph") == (fast and strategy != "context")  # recorded in the third step
    truth, one = on_one_process(family, ranks, torch.float64), on_one_process(family, ranks, torch.float32)
    for name in truth["metrics"][0]:
        limit = max(1e-5, 4 * metric_error(one, truth, name))
        assert metric_error(found, truth, name) <= limit, name
    for name in truth["weights"]:
        limit = max(2e-6, 4 * weight_error(one, truth, name))
        assert weight_error(found, truth, name) <= limit, name


@cache
def on_one_process(family: str, ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """The steps on the CPU, whose microbatches are the documents of each rank."""
    every = [[held(step, rank) for rank in range(ranks)] for step in range(len(STEPS))]
    return train(patch(tiny(family).to(dtype), verify=False), every)


def metric_error(found: dict[str, Any], truth: dict[str, Any], name: str) -> float:
    """The largest relative one of all steps."""
    pairs = zip(found["metrics"], truth["metrics"], strict=True)
    return float(np.max([abs(step[name] - right[name]) / (abs(right[name]) or 1.0) for step, right in pairs]))


def weight_error(found: dict[str, Any], truth: dict[str, Any], name: str) -> float:
    return float((found["weights"][name].double() - truth["weights"][name]).abs().max())
