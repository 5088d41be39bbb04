"""Run by ``torchrun`` in test_distributed_logprobs: a DPO step under each wrapper; rank 0 writes the gradients.

Argument: the file to write to. Ranks and micro-batches hold different numbers of pairs; one process takes all of them
in one micro-batch.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.torchrun import run_cases
from tests.torch_backend.torchrun_loss import CASES as WRAPPERS
from tests.torch_backend.torchrun_loss import Model, gradients
from torch_backend import normalise, reduce, token_logprobs
from torch_backend.losses.preference import dpo_loss

# Lengths of the chosen and the rejected document of each pair; by rank, by micro-batch.
PAIRS = [
    [[(5, 19), (33, 7)], [(40, 3)]],
    [[(9, 30)], [(4, 21)]],
]
CASES = (
    "DDP",
    "DDP, static graph",
    "FSDP2",
    "FSDP2, head on its own",
    "FSDP1, head on its own",
    "FSDP2, LoRA on the head",
    "tensor parallel, logits split",
)


def step(model: Model, microbatches: list[list[tuple[int, int]]], *, entropy: float = 0.1) -> dict[str, Tensor]:
    """The gradients of the mean loss over all pairs, with a little of each document's mean entropy."""
    pairs = torch.tensor(float(sum(map(len, microbatches))))
    for number, lengths in enumerate(microbatches):
        docs = [document for pair in lengths for document in documents(pair, seed=sum(pair))]
        batch = collate(docs, capacity=64)
        accumulate = number < len(microbatches) - 1 and isinstance(model, DDP) and not model.static_graph
        with model.no_sync() if accumulate else nullcontext():
            found = token_logprobs(model, batch, entropy=True)
            sums = reduce(found.logprobs, batch, "sum")
            spread = reduce(found.entropy, batch, "mean", where=batch["labels"] != -100).view(-1, 2).sum(1)
            losses = dpo_loss(sums[::2], sums[1::2], beta=0.3) - entropy * spread
            normalise(losses.sum(), pairs).backward()
    return gradients(model)


def on_rank(name: str) -> Any:
    _, wrap, everything = WRAPPERS[name]
    mine = PAIRS[dist.get_rank()]
    if everything:
        mine = [[pair for rank in PAIRS for microbatch in rank for pair in microbatch]]
    return step(wrap(tiny("qwen2")), mine)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), CASES, on_rank)
