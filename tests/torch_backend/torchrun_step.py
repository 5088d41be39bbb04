"""Run by ``torchrun`` in test_distributed_step: ``make_train_step`` under each wrapper; rank 0 writes what came out.

Argument: the file to write to. Two steps with clipping. Every rank takes its share of the documents of a step; one
process takes all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import leave, whole
from tests.torch_backend.torchrun_loss import plain, sharded, sharded_by_fsdp_1
from torch_backend import make_train_step

# The documents of each step, a line per microbatch; rank r of n takes every n-th from r on, so ranks differ in size.
STEPS = [[(5, 19, 33, 7), (40, 1, 2, 18)], [(9, 30, 3, 11), (4, 4, 21, 6)]]
Model = Any


def ddp(**options: Any) -> Callable[[Model], Model]:
    return lambda model: DDP(plain(model), **options)


# name -> (family, how several processes wrap the model, whether ranks differ in their number of microbatches)
CASES: dict[str, tuple[str, Callable[[Model], Model], bool]] = {
    "DDP, qwen3": ("qwen3", ddp(), False),
    "DDP, gpt_oss": ("gpt_oss", ddp(), False),
    "DDP, qwen3_5_text": ("qwen3_5_text", ddp(), False),
    "DDP, bloom": ("bloom", ddp(), False),
    "DDP, uneven microbatches": ("qwen2", ddp(), True),
    "DDP, static graph": ("qwen2", ddp(static_graph=True), False),
    "FSDP2": ("qwen2", sharded, False),
    "FSDP2, qwen3": ("qwen3", sharded, False),
    "FSDP2, gpt_oss": ("gpt_oss", sharded, False),
    "FSDP2, qwen3_5_text": ("qwen3_5_text", sharded, False),
    "FSDP1": ("qwen2", sharded_by_fsdp_1, False),
    "nothing": ("qwen2", plain, False),
}


def train(model: Model, shares: int, share: int, uneven: bool = False) -> dict[str, Any]:
    """The metrics of each step, and the weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, metrics = make_train_step(model, optimizer, max_grad_norm=0.5), []
    for microbatches in STEPS:
        docs = [documents(lengths, seed)[share::shares] for seed, lengths in enumerate(microbatches)]
        if uneven and share:
            docs = [docs[0] + docs[1]]
        metrics.append({name: float(x) for name, x in step([collate(each, capacity=64) for each in docs]).items()})
    return {"metrics": metrics, "weights": weights(model)}


def weights(model: Model) -> dict[str, torch.Tensor]:
    """Whole weights under the names of the model that is not wrapped."""
    with FSDP1.summon_full_params(model) if isinstance(model, FSDP1) else nullcontext():
        found = {name: p.detach() for name, p in model.named_parameters()}
        return whole(found)


def main(target: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    results: dict[str, Any] = {}
    for name, (family, wrap, uneven) in CASES.items():
        try:
            results[name] = train(wrap(tiny(family)), dist.get_world_size(), dist.get_rank(), uneven)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        torch.save(results, target)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
