"""The trainer of docs/models.md: GRPO whose loss takes the experts that computed the old log-probabilities."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.scored_trainers import policy
from torch_backend import record_routing
from torch_backend.hf import experts as packed_experts
from torch_backend.trainers.enable_packing import enable_packing

trl = pytest.importorskip("trl", reason="the trainer is TRL's")
PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()


def replaying() -> Any:
    """The class that the page shows."""
    (block,) = (code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "ReplayingTrainer" in code)
    names: dict[str, Any] = {}
    exec(block[: block.index("\n\n\ntokenizer =")], names)
    return names["ReplayingTrainer"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("adapter", [False, True])
def test_the_loss_takes_the_experts_of_the_old_log_probabilities(tmp_path, monkeypatch, family, adapter) -> None:
    """Two micro-batches of a generation, shuffled by TRL, over two updates: the second one has other weights."""
    taken: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
    seen: list[torch.Tensor] = []  # by the experts, layer by layer
    original = packed_experts.experts
    monkeypatch.setattr(
        packed_experts, "experts", lambda x, i, *args, **kw: seen.append(i) or original(x, i, *args, **kw)
    )

    class Watched(replaying()):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            ids, mask = (torch.cat((inputs[f"prompt_{x}"], inputs[f"completion_{x}"]), 1) for x in ("ids", "mask"))
            with torch.no_grad(), record_routing(model) as free:
                self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])
            recorded = torch.cat(inputs["experts"]).long()
            seen.clear()
            loss = super()._compute_loss(model, inputs)
            taken.append((recorded, torch.stack(seen, 1), torch.equal(torch.cat(free.documents).long(), recorded)))
            return loss

    monkeypatch.setattr(trl, "GRPOTrainer", Watched)
    options = {"num_iterations": 2, "max_steps": 2, "learning_rate": 3.0, "steps_per_generation": 2, "beta": 0.0}
    enable_packing(policy("GRPO", tmp_path, family, adapter=adapter, **options), verify=False, fast=False).train()
    assert len(taken) == 4
    assert all(torch.equal(recorded, seen) for recorded, seen, _ in taken)
    assert [free for *_, free in taken] == [True, True, False, False], "the router itself would choose others"
