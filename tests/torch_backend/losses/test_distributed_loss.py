"""Losses of a wrapped model: two processes have the gradients of one, in the first step and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.distributed import get_rank, get_world_size
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.wrappers import (
    Model,
    Wrapper,
    adapted,
    assert_same_weights,
    ddp,
    gradients,
    plain,
    sharded,
    sharded_adapters,
    sharded_by_fsdp_1,
    tensor_parallel,
    with_idle_parameter,
)
from torch_backend import normalise, reduce, token_logprobs
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.preference import dpo_loss

pytestmark = pytest.mark.slow  # starts processes that train


# The documents of each step, a line per microbatch; rank r of n takes every n-th from r on.
STEPS = [[(5, 19, 33, 7), (40, 1, 2, 18)], [(9, 30, 3, 11), (4, 4, 21, 6)]]
RATE = 0.1
Gradients = Callable[[Model, int, int], Iterator[dict[str, Tensor]]]  # of steps, by shares and the share of a rank


def prepared(model: Model) -> Model:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(plain(model))


# name -> (how one process wraps the model, how several do, whether every rank takes all documents)
CASES: dict[str, tuple[Wrapper, Wrapper, bool]] = {
    "DDP, unused parameters": (plain, with_idle_parameter, False),
    "DDP, static graph": (plain, ddp(static_graph=True), False),
    "DDP, LoRA on the head": (adapted, lambda model: DDP(adapted(model)), False),
    "FSDP2": (plain, sharded, False),
    "FSDP2, head on its own": (plain, lambda model: sharded(model, "lm_head"), False),
    "FSDP1, head on its own": (plain, sharded_by_fsdp_1, False),
    "FSDP2, LoRA on the head": (adapted, sharded_adapters, False),
    "tensor parallel": (plain, tensor_parallel(gathered=True), True),
    "tensor parallel, logits split": (plain, tensor_parallel(gathered=False), True),
    "accelerate": (plain, prepared, False),
}


def unsynchronised(model: Model, number: int, count: int) -> bool:
    """Returns whether a microbatch runs under ``no_sync``, as all but the last do where DDP can."""
    return number < count - 1 and isinstance(model, DDP) and not model.static_graph


def next_tokens(model: Model, shares: int, share: int) -> Iterator[dict[str, Tensor]]:
    """The gradients of steps, the second one on weights that the first one changed."""
    for step in STEPS:
        batches = [collate(documents(lengths, seed)[share::shares], capacity=64) for seed, lengths in enumerate(step)]
        # divided once per step, over all microbatches and ranks
        total = torch.tensor(float(sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)))
        for number, batch in enumerate(batches):
            with model.no_sync() if unsynchronised(model, number, len(batches)) else nullcontext():
                loss, weight = causal_lm_loss(model, batch)
                assert weight == (batch["labels"][:, 1:] != -100).sum()
                normalise(loss, total).backward() if shares > 1 else (loss / total).backward()
        yield gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None


def on_rank(case: str, gradients_of: Gradients) -> list[dict[str, Tensor]]:
    _, wrap, everything = CASES[case]
    shares, share = (1, 0) if everything else (get_world_size(), get_rank())
    return list(gradients_of(wrap(tiny("qwen2")), shares, share))


def assert_same_gradients(case: str, gradients_of: Gradients) -> None:
    """Two processes have the gradients of one."""
    many, one = on_ranks(on_rank, case, gradients_of), list(gradients_of(CASES[case][0](tiny("qwen2")), 1, 0))
    for found, wanted in zip(many, one, strict=True):
        assert_same_weights(found, wanted)
        idle = {name for name, gradient in wanted.items() if not gradient.abs().max() > 0}
        assert all(name.endswith("k_proj.bias") for name in idle), idle  # which no attention depends on


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradients_of_one(case: str) -> None:
    assert_same_gradients(case, next_tokens)


# Lengths of the chosen and the rejected document of each pair; by rank, by micro-batch.
PAIRS = [[[(5, 19), (33, 7)], [(40, 3)]], [[(9, 30)], [(4, 21)]]]


def preferences(model: Model, shares: int, share: int) -> Iterator[dict[str, Tensor]]:
    """The gradients of the mean DPO loss over all pairs, with a little of each document's mean entropy."""
    everything = [[pair for rank in PAIRS for microbatch in rank for pair in microbatch]]
    microbatches = everything if shares == 1 else PAIRS[share]
    pairs = torch.tensor(float(sum(map(len, microbatches))))
    for number, lengths in enumerate(microbatches):
        batch = collate([doc for pair in lengths for doc in documents(pair, seed=sum(pair))], capacity=64)
        with model.no_sync() if unsynchronised(model, number, len(microbatches)) else nullcontext():
            found = token_logprobs(model, batch, entropy=True)
            sums = reduce(found.logprobs, batch, "sum")
            spread = reduce(found.entropy, batch, "mean", where=batch["labels"] != -100).view(-1, 2).sum(1)
            losses = dpo_loss(sums[::2], sums[1::2], beta=0.3) - 0.1 * spread
            normalise(losses.sum(), pairs).backward()
    yield gradients(model)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("tensor parallel", "accelerate")])
def test_two_processes_have_the_gradients_of_one_in_a_step_of_preferences(case: str) -> None:
    assert_same_gradients(case, preferences)
