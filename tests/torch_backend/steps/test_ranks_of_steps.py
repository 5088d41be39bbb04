"""A step says where its targets are counted over other ranks than its gradients are reduced over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.torch_backend.models import tiny
from torch_backend import make_train_step, patch


@pytest.fixture(autouse=True)
def first_of_four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
def test_targets_and_gradients_of_the_same_ranks(wrapper: type, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(reduced_over: dist.ProcessGroup | None, counted_over: dist.ProcessGroup | None) -> list[str]:
        caplog.clear()
        options = {} if wrapper is DistributedDataParallel else {"device_id": torch.device("cpu")}
        model = wrapper(patch(tiny("qwen3"), verify=False), process_group=reduced_over, **options)
        make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), group=counted_over)
        return [record.getMessage() for record in caplog.records]

    half = dist.new_group([0, 1])
    assert warnings(None, None) == warnings(half, half) == []
    (of_others,), (of_fewer,) = warnings(half, None), warnings(None, half)
    assert of_others.startswith(f"{wrapper.__name__} reduces gradients over ranks 0, 1, and targets are counted over")
    assert "over ranks 0, 1, 2, 3, and targets are counted over ranks 0, 1. If" in of_fewer
