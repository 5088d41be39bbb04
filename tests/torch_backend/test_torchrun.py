"""Ranks of ``torchrun`` and one process train the same documents to the same weights, whoever holds which, by Trainer.

DDP, FSDP1, FSDP2 and, where DeepSpeed is installed, ZeRO-2, ZeRO-3 and tensor parallelism.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from packing_core import plan
from tests.torch_backend.test_trainer import CAPACITY, documents
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_training import DOCUMENTS, FAMILIES, RECORDED, train, untrained

pytestmark = pytest.mark.slow  # starts processes that train

RANKS = (2, 4)
DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="unsupported here: DeepSpeed is no dependency of any extra"
)
ROUTES = [("ddp", ranks) for ranks in RANKS] + [("fsdp1", 2), ("fsdp2", 2)]
ROUTES += [pytest.param((strategy, 2), marks=DEEPSPEED) for strategy in ("zero2", "zero3", "autotp")]  # type: ignore[misc]


@pytest.fixture(scope="module", params=ROUTES, ids=lambda route: f"{route[0]} on {route[1]} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of several ranks, by family: steps of 8 rows, in 2 microbatches of each rank."""
    strategy, count = request.param
    folder = tmp_path_factory.mktemp("ranks")
    rows = 4 if strategy == "autotp" else 4 // count
    torchrun("torchrun_training.py", str(folder), str(rows), "2", strategy, ranks=count)
    found: dict[str, Any] = torch.load(folder / "result.pt")
    return {**found, "strategy": strategy}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_train_as_one_process_does(ranks: dict[str, Any], family: str, tmp_path: Path) -> None:
    many, strategy = ranks[family], ranks["strategy"]
    if family == "bloom" and strategy in ("fsdp1", "fsdp2", "zero3"):
        assert "ranks would gather its parameters a different number of times, and hang" in many
        return
    if family == "bloom" and strategy == "autotp":
        assert "DeepSpeed's tensor parallelism cannot split bloom" in many
        return
    assert many["sharded"] == (strategy in ("fsdp1", "fsdp2", "zero3"))
    assert many["replays"] == (2 if RECORDED.get(strategy) == family else 0)  # the microbatches of the second step
    one = train(untrained(family), tmp_path, rows_at_once=4, accumulation=2, strategy="ddp")
    data = documents(DOCUMENTS)
    rows = plan([len(ids) for ids in data["input_ids"]], CAPACITY, strategy="sequential", seed=None).to_lists()
    trained = [sum(label != -100 for label in labels[1:]) for labels in data["labels"]]
    targets = [sum(trained[d] for row in rows[a : a + 8] for d in row) for a in (0, 8)]
    assert len(rows) == 16
    assert list(many["counts"][:2]) == list(one["counts"][:2]) == targets
    split = {name for name, weight in one["model"].items() if many["model"][name].shape != weight.shape}
    assert bool(split) == (strategy == "autotp")
    for name in one["model"].keys() - split:
        weight = one["model"][name]
        largest = float(weight.abs().max())
        assert float((many["model"][name] - weight).abs().max()) <= 1e-6 * max(largest, 1.0), name
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-4)
    before = dict(untrained(family).named_parameters())
    assert max(float((weight - before[name]).abs().max()) for name, weight in one["model"].items()) > 1e-3
