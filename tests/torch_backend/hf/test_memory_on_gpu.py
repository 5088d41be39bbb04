"""Levels of memory on a GPU: captured steps train the same, and hold less at their peak; by tiles too."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from tests.torch_backend.models import documents
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.ops import tiles
from torch_backend.steps import tiled_layers
from torch_backend.steps.memory import LEVELS
from torch_backend.steps.memory_fit import StepMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = 4096
ROUNDING = 5e-3  # of bfloat16, in a loss of about 9


def made() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    return patch(model, verify=False).train()


def trained(level: Any) -> tuple[torch.Tensor, int]:
    """The losses of steps at a level, and the most bytes that they held."""
    model = made()
    collate = PackedCollator(model, capacity=TOKENS, max_seqlen=1024, bucket=16)
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=level)
    found = []
    for number in range(8):
        lengths = (1000, 900 - number, 700, 800, 500 + number)
        batch = collate([{"input_ids": document.tolist()} for document in documents(lengths, seed=number)])
        if number == 1:  # of the steps that warm up and record: replays allocate nothing
            torch.cuda.reset_peak_memory_stats()
        found.append(float(step(batch)["loss"]))
    assert step.parts["graph"] == "CUDA graph", step.parts
    held = torch.cuda.max_memory_allocated()
    del step, model, collate
    torch.cuda.empty_cache()
    return torch.tensor(found), held


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "none"])
def test_captured_steps_lose_what_they_lose_without_it_and_hold_less(level: Any) -> None:
    wanted, most = trained("none")
    losses, held = trained(level)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=ROUNDING)
    assert wanted.std() > 0
    assert held < most


@pytest.mark.parametrize("level", ["selective", "full"])
def test_captured_steps_by_tiles_lose_what_they_lose_without_them(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = trained(level)
    monkeypatch.setattr(StepMemory, "fits_whole", lambda *_: False)
    monkeypatch.setattr(tiled_layers, "TILED_FROM", TOKENS)
    monkeypatch.setattr(tiled_layers, "TILE", TOKENS // 4)
    normed = Mock(wraps=tiles.rms_norm)
    monkeypatch.setattr(tiles, "rms_norm", normed)
    losses, _ = trained(level)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=ROUNDING)
    assert any(len(call.args[0]) == TOKENS // 4 for call in normed.call_args_list)
