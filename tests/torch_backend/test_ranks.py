"""Ranks stay up from call to call, and no test hangs on one that fails."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.torch_backend import ranks
from tests.torch_backend.ranks import everyones, on_ranks, refused

pytestmark = pytest.mark.slow  # starts processes


def total(number: int) -> list[Any]:
    x = torch.tensor(number * (1 + dist.get_rank()))
    dist.all_reduce(x)
    return [int(x), everyones(os.getpid())]


def raised_by(*which: int) -> None:
    if dist.get_rank() in which:
        raise ValueError(f"rank {dist.get_rank()} refuses")
    dist.barrier()


def test_ranks_stay_from_call_to_call_whatever_all_of_them_raise() -> None:
    (two, processes), (three, more) = on_ranks(total, 1), on_ranks(total, 1, ranks=3)
    assert (two, three) == (3, 6) and more[:2] == processes
    assert refused(raised_by, 0, 1) == ["ValueError: rank 0 refuses", "ValueError: rank 1 refuses"]
    assert on_ranks(total, 2) == [6, processes]
    with pytest.raises(AssertionError, match="2 ranks ran for more than 1 s"):
        on_ranks(time.sleep, 600, limit=1)
    assert not any(psutil.pid_exists(process) for process in more)


def test_ranks_end_where_one_of_them_alone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _, processes = on_ranks(total, 1)
    monkeypatch.setattr(ranks, "GRACE", 1)
    with pytest.raises(AssertionError, match=r"(?s)1 ranks ran for more than .* raise ValueError.*rank 1 refuses"):
        on_ranks(raised_by, 1)
    assert not any(psutil.pid_exists(process) for process in processes)
