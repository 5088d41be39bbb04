"""enable_packing(AsyncGRPOTrainer): TRL's tree rows by this project's attention are each sample alone."""

from __future__ import annotations

import itertools
import queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.models import documents, error, tiny
from tests.torch_backend.preference import arguments, tokenizer, trained
from torch_backend import explain
from torch_backend.trainers.enable_packing import enable_packing
from torch_backend.trainers.tree_rows import TREE_ATTENTION, segments_of

datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
packing: Any = pytest.importorskip("trl.experimental.async_grpo.packing", reason="TRL 1.16 and newer have tree rows")


def samples() -> list[torch.Tensor]:
    """Two prompts of one system prompt with two completions each, and a sample of its own."""
    system, one, other, *ends, own = documents((12, 9, 7, 4, 1, 6, 3, 15))
    return [torch.cat([system, part, end]) for part, end in zip((one, one, other, other), ends, strict=True)] + [own]


def row_of(ids: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """TRL's own row of these samples, of which the last tokens are trained."""
    row = packing.TreeRow()
    for group, each in enumerate(ids):
        mask = torch.arange(len(each)) >= len(each) - 3
        logprobs = torch.zeros(len(each))
        row.add({"input_ids": each, "completion_mask": mask, "old_log_probs": logprobs, "advantage": 1.0,
                 "group_id": group})  # fmt: skip
    return row.pack()


def trainer_of(model: nn.Module) -> Any:
    """A trainer as far as enable_packing reads it: building one needs a server of vLLM."""
    model.set_attn_implementation(TREE_ATTENTION)
    kind = type("AsyncGRPOTrainer", (), {"__module__": "trl.experimental.async_grpo.async_grpo_trainer"})
    trainer = kind()
    trainer.model = model
    return trainer


@pytest.fixture(autouse=True)
def _trl_registers_its_own() -> Any:
    packing.register_tree_attention()
    assert packing.TREE_ATTENTION == TREE_ATTENTION
    yield
    packing.register_tree_attention()


def logprobs_of_row(model: nn.Module, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """As the trainer calls its model; of each trained token."""
    given = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    given["tree_max_seqlen_q"], given["tree_max_seqlen_k"] = row["tree_max_seqlens"].tolist()
    logits = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], **given).logits[0]
    places = row["token_index"]
    return logits.log_softmax(-1)[places, row["shift_labels"][places]]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(family, checkpointing):
    ids, model, stock = samples(), tiny(family), tiny(family)
    row = row_of(ids)
    assert len(row["input_ids"]) < sum(map(len, ids))
    trainer = enable_packing(trainer_of(model))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = logprobs_of_row(model, row)
    (found * torch.linspace(-1, 2, len(found))).sum().backward()

    alone = []
    for each in ids:
        logits = stock(input_ids=each[None], use_cache=False).logits[0].log_softmax(-1)
        alone.append(logits[:-1].gather(1, each[1:, None])[-3:, 0])
    right = torch.cat(alone)
    (right * torch.linspace(-1, 2, len(right))).sum().backward()
    assert error(found.detach(), right.detach()) <= 1e-5
    for (name, p), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert error(p.grad, other.grad) <= 1e-5, name
    said = str(explain(trainer))
    assert "attention -> sdpa" in said and "rows share prefixes; their attention is crosspack's" in said


def test_an_update_of_the_trainer_itself_is_that_of_each_sample_alone(tmp_path, monkeypatch):
    """Two micro-batches of four samples, from a queue in place of a server."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1.0)  # asks a GPU for its name
    given = samples()[:4] + [ids.flip(0) for ids in samples()[:4]]
    masks = [torch.arange(len(ids)) >= len(ids) - 2 - i for i, ids in enumerate(given)]
    old = [torch.full((len(ids),), -4.5) + torch.linspace(-0.5, 0.5, len(ids)) for ids in given]
    advantages = torch.linspace(-1, 2, 8)
    queued = [
        RolloutSample([], [], ids.numpy(), mask.numpy(), logprobs.numpy(), float(advantages[i]), 0, i // 4, {})
        for i, (ids, mask, logprobs) in enumerate(zip(given, masks, old, strict=True))
    ]
    endless = itertools.cycle(queued)
    buffer = SimpleNamespace(get=lambda timeout: next(endless), qsize=lambda: 8)
    server = MagicMock(rollout_buffer=buffer, metrics_queue=queue.Queue())
    tiny("qwen3").save_pretrained(tmp_path)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    options |= {"token_budget": 0, "temperature": 0.8, "dtype": "float32"}
    trainer = AsyncGRPOTrainer(
        str(tmp_path),
        lambda **_: 0.0,
        args=arguments(AsyncGRPOConfig, tmp_path, **options),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w4"}] * 2),
        processing_class=tokenizer(),
        rollout_worker=server,
        weight_transfer=server,
    )
    found, _ = trained(enable_packing(trainer))

    stock, totals = tiny("qwen3"), []
    for ids, mask, before, advantage in zip(given, masks, old, advantages, strict=True):
        logits = stock(input_ids=ids[None], use_cache=False).logits[0] / 0.8
        ratio = (logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] - before[1:])[mask[1:]].exp()
        totals.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum())
    counts = [sum(int(mask.sum()) for mask in masks[i : i + 4]) for i in (0, 4)]
    ((sum(totals[:4]) / counts[0] + sum(totals[4:]) / counts[1]) / 2).backward()
    for name, p in stock.named_parameters():
        assert error(found[f"gradient of {name} in step 0"], p.grad) <= 1e-5, name


def test_a_row_is_read_once_for_all_layers(monkeypatch):
    from torch_backend.trainers import tree_rows

    read = []
    monkeypatch.setattr(tree_rows, "segments_of", lambda *given: read.append(1) or segments_of(*given))
    model = tiny("qwen3")
    assert len(model.model.layers) == 2
    enable_packing(trainer_of(model))
    for _ in range(2):
        logprobs_of_row(model, row_of(samples()))
    assert len(read) == 2


def test_segments_have_the_parents_of_the_tree():
    #   0..2 -> 3 -> 4..5
    #        -> 6..7           8 alone
    kv = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8])
    found = segments_of(kv, torch.tensor([0, 3, 4, 6, 8, 9]), torch.tensor([0, 3, 7, 13, 18, 19]))
    assert found.lengths == (3, 1, 2, 2, 1) and found.parents == (-1, 0, 1, 0, -1)


@pytest.mark.parametrize(
    ("family", "changes", "options", "refusal", "message"),
    [
        ("qwen3", {}, {"capacity": 64}, PackingError, "makes its rows itself .* so capacity=64 has no effect"),
        ("qwen3", {}, {"max_segments": 4}, PackingError, "so max_segments=4 has no effect"),
        ("qwen3", {}, {"order": "curriculum"}, PackingError, "so order='curriculum' has no effect"),
        ("qwen3", {}, {"equal_cost": True}, PackingError, "so equal_cost=True has no effect"),
        ("qwen3", {}, {"share_prefix": False}, PackingError, "so share_prefix=False has no effect"),
        ("qwen3", {}, {"memory": "full"}, PackingError, "so memory='full' has no effect"),
        ("qwen3", {}, {"precision": "float8"}, PackingError, "so precision='float8' has no effect"),
        ("qwen3", {"attention_dropout": 0.1}, {}, UnsupportedModelError, "dropout .* samples that share a prefix"),
        ("qwen3_5_text", {}, {}, UnsupportedModelError, "TRL hands its trees to attention layers alone"),
        ("phi3", {"rope": True}, {}, UnsupportedModelError, "its rotary frequencies depend on the length"),
    ],
)
def test_what_would_not_be_exact_is_refused(family, changes, options, refusal, message):
    from tests.torch_backend.hf.test_conditions import CHANGES

    model = tiny(family, **(CHANGES[family] if "rope" in changes else changes))
    with pytest.raises(refusal, match=message):
        enable_packing(trainer_of(model), **options)


def test_a_trainer_without_tree_rows_is_refused():
    trainer = trainer_of(tiny("qwen3"))
    trainer.model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="AsyncGRPOTrainer of this TRL has no tree rows: install trl 1.16"):
        enable_packing(trainer)
