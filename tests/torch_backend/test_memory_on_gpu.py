"""Levels of memory on a GPU: captured steps train the same, and hold less at their peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.torch_backend.models import documents
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.steps.memory import LEVELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = 4096
ROUNDING = 5e-3  # of bfloat16, in a loss of about 9


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=TOKENS,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    return patch(made, verify=False).train()


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "none"])
def test_captured_steps_lose_what_they_lose_without_it_and_hold_less(level: Any) -> None:
    losses, peaks = {}, {}
    for each in ("none", level):
        trained = model()
        collate = PackedCollator(trained, capacity=TOKENS, max_seqlen=1024, bucket=16)
        step = make_train_step(trained, torch.optim.SGD(trained.parameters(), lr=0.1), memory=each)
        found = []
        for number in range(8):
            lengths = (1000, 900 - number, 700, 800, 500 + number)
            batch = collate([{"input_ids": document.tolist()} for document in documents(lengths, seed=number)])
            if number == 1:  # of the steps that warm up and record: replays allocate nothing
                torch.cuda.reset_peak_memory_stats()
            found.append(float(step(batch)["loss"]))
        assert step.parts["graph"] == "CUDA graph", step.parts
        losses[each] = torch.tensor(found)
        held = torch.cuda.max_memory_allocated()
        del step, trained, collate
        torch.cuda.empty_cache()
        peaks[each] = held
    torch.testing.assert_close(losses[level], losses["none"], rtol=0, atol=ROUNDING)
    assert losses["none"].std() > 0
    assert peaks[level] < peaks["none"]
