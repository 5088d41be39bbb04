"""Ranks that have different numbers of batches: the step and its evaluation wait for no rank that has no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2ForSequenceClassification

from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.ranks import on_ranks, refused
from tests.torch_backend.wrappers import Model, Wrapper, ddp, plain, sharded, sharded_by_fsdp_1
from torch_backend import PackedCollator, make_train_step
from torch_backend.steps.graph_collectives import Counts


class Ranks(Counts):
    """Two ranks of one process; the other one has as many batches as ``other``."""

    def __init__(self, other: int) -> None:
        super().__init__(None, 1)
        self.other = other

    def largest(self, *values: int) -> list[int]:
        theirs = [self.other, -self.other]
        return [max(pair) for pair in zip(values, theirs, strict=True)]


def test_a_rank_that_has_fewer_microbatches_runs_its_last_one_without_targets() -> None:
    batches: list[Any] = [{"number": 1}, {"number": 2}]

    def emptied(batch: Any) -> Any:
        return {"empty": batch["number"]}

    assert Ranks(2).evened(batches, emptied) == Ranks(1).evened(batches, emptied) == batches
    assert Ranks(4).evened(batches, emptied) == [*batches, {"empty": 2}, {"empty": 2}]


# lengths of the documents of each batch, by rank: two ranks have one batch and three
BATCHES = [[(33, 5)], [(20, 9), (40,), (7, 8, 3)]]
WRAPS: dict[str, Wrapper] = {"DDP": ddp(), "FSDP1": sharded_by_fsdp_1, "FSDP2": sharded}


def given(rank: int) -> list[Any]:
    return [collate(documents(lengths, 10 * rank + i), capacity=64) for i, lengths in enumerate(BATCHES[rank])]


def evaluated(model: Model, batches: Any) -> dict[str, float]:
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {name: float(x) for name, x in step.evaluate(batches).items()}


def evaluation(wrap: str) -> dict[str, float]:
    return evaluated(WRAPS[wrap](tiny("qwen2")), iter(given(dist.get_rank())))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
def test_an_evaluation_of_uneven_ranks_is_that_of_one_process(wrap: str) -> None:
    one = evaluated(plain(tiny("qwen2")), [*given(0), *given(1)])
    assert on_ranks(evaluation, wrap) == pytest.approx(one, rel=1e-6)


def without_batches(wrap: str) -> Any:
    return evaluated(WRAPS[wrap](tiny("qwen2")), given(1) if dist.get_rank() else [])


def without_labels(wrap: str) -> Any:
    model, batches = WRAPS[wrap](tiny("qwen2")), given(dist.get_rank())
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return step(batches if dist.get_rank() else [{**batches[0], "labels": None}])


def regression() -> Any:
    config = tiny("qwen2").config
    config.num_labels, config.pad_token_id = 1, 0
    model = plain(Qwen2ForSequenceClassification(config).train())
    batch = PackedCollator(model, capacity=64)([{"input_ids": documents((9,))[0].tolist(), "labels": 0.5}])
    fully_shard(model)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return step([batch] * (1 + dist.get_rank()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "arguments", "text"),
    [
        (without_batches, ["FSDP2"], "a rank has no batch to evaluate"),
        (without_batches, ["DDP"], "a rank has no batch to evaluate"),
        (without_labels, ["FSDP2"], "no microbatch with"),
        (regression, [], "pass the same number on every rank"),
    ],
)
def test_what_one_rank_cannot_run_is_refused_on_all(call: Any, arguments: list[str], text: str) -> None:
    assert all(text in error for error in refused(call, *arguments))
