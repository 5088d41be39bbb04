"""Experts that transformers spreads over two ranks train packed documents as one process does."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest

from tests.torch_backend.models import tiny
from tests.torch_backend.torchrun import torchrun

distributed = pytest.importorskip("transformers.distributed", reason="unsupported here: an older transformers")
pytestmark = [
    pytest.mark.slow,  # starts processes that train
    pytest.mark.skipif(
        "ep_size" not in signature(distributed.DistributedConfig).parameters,
        reason="unsupported here: this transformers spreads no experts over ranks",
    ),
]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_spread_experts_train_as_one_process_does(family: str, tmp_path: Path) -> None:
    implementations = "grouped_mm", "crosspack"
    tiny(family).save_pretrained(tmp_path / "model")
    torchrun("torchrun_experts.py", str(tmp_path / "model"), str(tmp_path / "found.json"), *implementations)
    found = json.loads((tmp_path / "found.json").read_text())
    reads = "the experts of model.layers.0.mlp.experts are spread over ranks, which read how many tokens each gets"
    for name in implementations:
        run = found[name]
        assert run["error"] <= 1e-5, run
        assert run["experts"] >= 4 and run["reads"] == reads
        assert f"layers.0.mlp.experts: experts -> {name}" in run["explained"]
        assert "not crosspack: expert parallelism spreads them over ranks" in run["explained"]
