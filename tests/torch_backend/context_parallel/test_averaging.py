"""A DDP model averages its gradients at the end of the backward where it may; over ranks: test_context_parallel.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from unittest.mock import patch as mocked

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_backend.job.ranks import Ranks
from torch_backend.steps import graph_collectives
from torch_backend.steps.graph_collectives import average_at_the_end, why_not_recorded

NAME = "TORCH_NCCL_HIGH_PRIORITY"


@pytest.fixture(autouse=True)
def first_of_two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def hooks(model: DistributedDataParallel) -> list[str]:
    return [hook.__name__ for hook, _ in model._comm_hooks]


def test_a_model_can_be_copied_and_its_copy_recorded() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    average_at_the_end(model)
    again = deepcopy(model)  # DDP begins anew in it, without a hook
    average_at_the_end(again)
    assert why_not_recorded(again) is None


def test_slow_links_average_beside_the_backward() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with mocked.object(graph_collectives, "links_too_slow", lambda _: "ranks exchange only 5 GB a second"):
        average_at_the_end(model)
    assert not hooks(model)


@pytest.mark.parametrize("high", [False, True])
def test_a_job_asks_for_streams_of_high_priority(high: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append(os.environ.get(NAME)))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.delenv(NAME, raising=False)
    found: list[str | None] = []
    with monkeypatch.context() as patches:
        patches.setattr(dist, "destroy_process_group", lambda: None)
        with Ranks(0, 2).joined(torch.device("cpu"), high_priority=high):
            assert found == ["1" if high else None]
