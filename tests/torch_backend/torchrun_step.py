"""Run by ``torchrun`` in test_distributed_step: ``make_train_step`` under each wrapper; rank 0 writes what came out.

Argument: the file to write to. Two steps with clipping. Every rank takes its share of the documents of a step; one
process takes all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.graphs import stand_in
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import run_cases, weights_of
from tests.torch_backend.torchrun_loss import plain, sharded, sharded_by_fsdp_1, with_idle_parameter
from torch_backend import make_train_step

# The documents of each step, a line per microbatch; rank r of n takes every n-th from r on, so ranks differ in size.
# Each of two ranks, and of four, has as many long ones in every microbatch: its batches have one form from the first.
STEPS = [
    [(33, 40, 35, 45, 7, 1, 19, 2), (50, 34, 41, 36, 5, 18, 2, 9)],
    [(36, 47, 38, 33, 3, 11, 4, 19), (39, 34, 45, 35, 6, 4, 9, 1)],
]
Model = Any


def ddp(**options: Any) -> Callable[[Model], Model]:
    return lambda model: DDP(plain(model), **options)


def hooked(model: Model) -> Model:
    model = DDP(plain(model))
    model.register_comm_hook(None, allreduce_hook)
    return model


class Case(NamedTuple):
    """A training case of several ranks.

    Attributes:
        wrap: what several processes put around the model.
        uneven: ranks differ in their number of microbatches.
        replays: forward and backward are recorded (tests/torch_backend/graphs.py), and rank 0 replays so often.
        odd: the last rank's second step has longer rows, for which nothing is recorded.
    """

    family: str
    wrap: Callable[[Model], Model]
    uneven: bool = False
    replays: int | None = None
    odd: bool = False


CASES: dict[str, Case] = {
    "DDP, qwen3": Case("qwen3", ddp()),
    "DDP, gpt_oss": Case("gpt_oss", ddp()),
    "DDP, qwen3_5_text": Case("qwen3_5_text", ddp()),
    "DDP, bloom": Case("bloom", ddp()),
    "DDP, uneven microbatches": Case("qwen2", ddp(), uneven=True),
    "DDP, static graph": Case("qwen2", ddp(static_graph=True)),
    "DDP, communication hook": Case("qwen2", hooked),
    "FSDP2": Case("qwen2", sharded),
    "FSDP2, qwen3": Case("qwen3", sharded),
    "FSDP2, gpt_oss": Case("gpt_oss", sharded),
    "FSDP2, qwen3_5_text": Case("qwen3_5_text", sharded),
    "FSDP1": Case("qwen2", sharded_by_fsdp_1),
    "nothing": Case("qwen2", plain),
    "DDP, graphs, uneven microbatches": Case("qwen3", with_idle_parameter, uneven=True, replays=2),
    "DDP, graphs, a rank without one": Case("gpt_oss", ddp(), replays=2, odd=True),
    "FSDP2, graphs": Case("qwen3", sharded, replays=2),
    "FSDP2, graphs, a rank without one": Case("qwen2", sharded, replays=0, odd=True),
}


def train(case: Case, model: Model, shares: int, share: int) -> dict[str, Any]:
    """The metrics of each step, the weights after it, and what was recorded."""
    graphs = stand_in() if case.replays is not None and shares > 1 else SimpleNamespace()
    graphs.model = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, metrics = make_train_step(model, optimizer, max_grad_norm=0.5), []
    for number, microbatches in enumerate(STEPS):
        docs = [documents(lengths, seed)[share::shares] for seed, lengths in enumerate(microbatches)]
        if case.uneven and share:
            docs = [docs[0] + docs[1]]
        capacity = 80 if case.odd and number and share == shares - 1 else 64
        given = [collate(each, capacity=capacity) for each in docs]
        metrics.append({name: float(x) for name, x in step(given).items()})
    return {
        "metrics": metrics,
        "weights": weights_of(model),
        "graph": step.parts["graph"],
        "replays": getattr(graphs, "replayed", None),
    }


def on_rank(name: str) -> Any:
    case = CASES[name]
    return train(case, case.wrap(tiny(case.family)), dist.get_world_size(), dist.get_rank())


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), CASES, on_rank)
