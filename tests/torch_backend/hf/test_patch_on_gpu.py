"""Patched models on a GPU: exact on every route and level of memory, and nothing is read back while they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor

import torch_backend
from packing_core.errors import LayoutError
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.ops import tiles
from torch_backend.packed_tokens import plain
from torch_backend.steps import tiled_layers
from torch_backend.steps.memory import LEVELS
from torch_backend.steps.memory_fit import StepMemory

pytestmark = pytest.mark.gpu


DEVICE = "cuda"
# attention; mixers on the row with attention beside them; mixers alone; the whole decoder per document
ROUTES = ["qwen3", "qwen3_5_text", "mamba2", "bloom", "falcon_alibi"]
READ_NOTHING = ["qwen3", "qwen3_5_text", "mamba2", "lfm2"]


def on_device(batch: dict) -> dict:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in batch.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ROUTES)
def test_every_route_is_exact(family: str, dtype: torch.dtype) -> None:
    report = torch_backend.audit(tiny(family).to(DEVICE, dtype), patched=True)
    assert report.verdict == "exact", str(report)
    assert report.device == DEVICE


def test_windows_and_sinks_are_exact() -> None:
    model, docs = tiny("gpt_oss").to(DEVICE), [document.to(DEVICE) for document in documents()]
    model.set_experts_implementation("eager")
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs, on_device(collate([document.cpu() for document in docs]))), truth, 1e-4)
    assert "window 12" in str(torch_backend.explain(model)) and "sinks" in str(torch_backend.explain(model))


@pytest.fixture
def tensorfloat32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tensorfloat32")
def test_the_verdict_does_not_depend_on_tensorfloat32() -> None:
    report = torch_backend.audit(tiny("qwen3").to(DEVICE), patched=True)
    assert report.verdict == "exact" and report.logits <= 1e-5, str(report)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.fixture
def no_reading() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", READ_NOTHING)
def test_nothing_is_read_back_in_a_packed_step(family: str, checkpointing: bool) -> None:
    model = torch_backend.patch(tiny(family).to(DEVICE, torch.bfloat16), verify=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [on_device(collate(documents(seed=seed))) for seed in (1, 2, 3)]
    for batch in batches[:2]:  # choosing implementations and compiling kernels may wait for the device
        model(**batch).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    loss = model(**batches[2]).loss
    loss.backward()
    torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


def test_a_batch_without_marks_is_refused_as_on_the_cpu() -> None:
    model = torch_backend.patch(tiny("qwen3").to(DEVICE), verify=False)
    batch = plain(on_device(collate(documents())))
    for change in ({"position_ids": batch["position_ids"]}, {"attention_mask": batch["seq_idx"].long() + 1}):
        with pytest.raises(LayoutError, match="^(position_ids restart|attention_mask is neither 0 nor 1)"):
            model(input_ids=batch["input_ids"], **change)
    model.eval()(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    torch.cuda.synchronize()
    with pytest.raises(LayoutError, match="^in an earlier batch: position_ids restart"):
        model(input_ids=batch["input_ids"])


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
    peak = torch.cuda.max_memory_allocated()
    del step, model, collate
    torch.cuda.empty_cache()
    return torch.tensor(found), peak


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
