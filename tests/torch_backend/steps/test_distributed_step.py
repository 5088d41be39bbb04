"""Steps over ranks are those of one process, under DDP and FSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.graphs import stand_in
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.ranks import on_ranks, refused
from tests.torch_backend.wrappers import (
    Model,
    assert_same_weights,
    ddp,
    plain,
    shard,
    sharded,
    sharded_by_fsdp_1,
    weights_of,
    with_idle_parameter,
)
from torch_backend import make_train_step

pytestmark = pytest.mark.slow  # starts processes that train

# The documents of each step, a line per microbatch; rank r of n takes every n-th from r on, so ranks differ in size.
# Each of two ranks, and of four, has as many long ones in every microbatch: its batches have one form from the first.
STEPS = [
    [(33, 40, 35, 45, 7, 1, 19, 2), (50, 34, 41, 36, 5, 18, 2, 9)],
    [(36, 47, 38, 33, 3, 11, 4, 19), (39, 34, 45, 35, 6, 4, 9, 1)],
]


def hooked(model: Model) -> Model:
    model = DDP(plain(model))
    model.register_comm_hook(None, allreduce_hook)
    return model


def sharded_first(model: Model) -> Model:
    return plain(shard(model))


class Case(NamedTuple):
    """A training case of several ranks."""

    family: str
    wrap: Callable[[Model], Model]  # what several processes put around the model
    uneven: bool = False  # ranks differ in their number of microbatches
    replays: int | None = None  # forward and backward are recorded (graphs.py), and rank 0 replays so often
    odd: bool = False  # the last rank's second step has longer rows, for which nothing is recorded
    graph: str = ""  # why nothing is recorded, where a test asks
    ranks: int = 2


CASES: dict[str, Case] = {
    "DDP, qwen3": Case("qwen3", ddp()),
    "DDP, falcon_alibi": Case("falcon_alibi", ddp()),
    "DDP, uneven microbatches, on four": Case("qwen2", ddp(), uneven=True, ranks=4),
    "DDP, static graph": Case("qwen2", ddp(static_graph=True), graph="DDP has a static graph, or a precision of its"),
    "DDP, communication hook": Case("gpt_oss", hooked, graph="a communication hook of DDP reduces the gradients"),
    "FSDP2, gpt_oss": Case("gpt_oss", sharded, graph="the model computes on cpu"),
    "FSDP2, qwen3_5_text, on four": Case("qwen3_5_text", sharded, ranks=4),
    "FSDP2, MoE, uneven microbatches": Case("gpt_oss", sharded, uneven=True),
    "FSDP2 before the patch, qwen3": Case("qwen3", sharded_first),
    "FSDP2 before the patch, mixers of whole rows": Case("bamba", sharded_first),
    "FSDP2 before the patch, mixers per document": Case("jamba", sharded_first),
    "FSDP2, mamba": Case("mamba", sharded),
    "FSDP2, bloom": Case("bloom", sharded),
    "FSDP1, uneven microbatches": Case(
        "qwen2", sharded_by_fsdp_1, uneven=True, graph="gradients are reduced over ranks during the backward"
    ),
    "DDP, graphs, uneven microbatches": Case("qwen3", with_idle_parameter, uneven=True, replays=2),
    "DDP, graphs, a rank without one": Case("gpt_oss", ddp(), replays=2, odd=True),
    "FSDP2, graphs": Case("qwen3", sharded, replays=2),
    "FSDP2, graphs, uneven microbatches, on four": Case("qwen3", sharded, uneven=True, replays=2, ranks=4),
    "FSDP2, graphs, a rank without one": Case("qwen2", sharded, replays=0, odd=True),
}


def train(case: Case, model: Model, shares: int, share: int) -> dict[str, Any]:
    """The metrics of each step, the weights after it, and what was recorded."""
    with pytest.MonkeyPatch.context() as patched:
        graphs = stand_in(patched.setattr) if case.replays is not None and shares > 1 else SimpleNamespace()
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


@cache
def on_one_process(family: str) -> dict[str, Any]:
    return train(Case(family, plain), plain(tiny(family)), shares=1, share=0)


def on_rank(name: str) -> dict[str, Any]:
    case = CASES[name]
    return train(case, case.wrap(tiny(case.family)), dist.get_world_size(), dist.get_rank())


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_steps_of_one(name: str) -> None:
    case = CASES[name]
    one, many = on_one_process(case.family), on_ranks(on_rank, name, ranks=case.ranks)
    for found, wanted in zip(many["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert many["replays"] == case.replays, many["graph"]
    assert many["graph"].startswith(f"no CUDA graph: {case.graph}") or not case.graph
    many["weights"].pop("idle", None)
    assert_same_weights(many["weights"], one["weights"])
    start = dict(tiny(case.family).named_parameters())
    assert max(float((weight - start[name].detach()).abs().max()) for name, weight in one["weights"].items()) > 1e-3


def trained_apart(family: str, wrap: Callable[[Model], Model]) -> None:
    train(Case(family, wrap), wrap(tiny(family)), 2, dist.get_rank())


@pytest.mark.parametrize(
    ("family", "wrap", "reason"),
    [
        ("qwen2", plain, "2 ranks would train Qwen2ForCausalLM apart"),  # nothing reduces its gradients
        ("falcon_alibi", sharded, "is sharded by FSDP, and "),  # its decoder runs per document
        ("falcon_alibi", sharded_first, "is sharded by FSDP, and "),
    ],
)
def test_what_ranks_cannot_train_is_refused(family: str, wrap: Callable[[Model], Model], reason: str) -> None:
    for text in refused(trained_apart, family, wrap):
        assert text.startswith("Unsupported") and reason in text
