"""The workload of the training step's benchmark: shapes with random weights, documents, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_clock import DEVICE, TOY
from packing_core import PackPlan, pack, plan
from torch_backend import PackedCollator

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_train.jsonl"
LONGEST = 64 if TOY else 2_048
DTYPE = torch.float32 if TOY else torch.bfloat16
Batch = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's shape and how it is trained.

    Attributes:
        make: few layers or all of them -> config.
        capacities: of rows.
        lora: train adapters of rank 16 alone.
        padded: documents in a padded batch.
        steps: to time, at most.
        attention: what transformers runs on each document alone, and in contenders that name none.
        adapters: model -> the model with adapters, if ``lora``; those of dense layers if None.
    """

    name: str
    make: Callable[[bool], Any]
    capacities: Sequence[int]
    lora: bool = False
    padded: int = 8
    steps: int = 16
    attention: str = "sdpa"
    adapters: Callable[[Any], Any] | None = None


def qwen2(few: bool) -> Any:
    from transformers import Qwen2Config

    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    if not TOY:
        size = {"hidden_size": 896, "intermediate_size": 4_864, "num_attention_heads": 14, "num_key_value_heads": 2}
    layers = 2 if few or TOY else 24
    return Qwen2Config(
        **size, num_hidden_layers=layers, vocab_size=199 if TOY else 151_936, tie_word_embeddings=True,
        layer_types=["full_attention"] * layers, max_position_embeddings=32_768,
    )  # fmt: skip


def llama3(few: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4_096, intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=2 if few else 32, vocab_size=128_256, tie_word_embeddings=False,
        max_position_embeddings=8_192,
    )  # fmt: skip


def qwen35(few: bool, *, toy: bool = TOY) -> Any:
    from transformers import Qwen3_5TextConfig

    layers = 4 if few or toy else 8
    size = {
        "hidden_size": 1_024, "intermediate_size": 3_584, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "vocab_size": 248_320,
    }  # fmt: skip
    if toy:
        size = {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "vocab_size": 199,
        }  # fmt: skip
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    return Qwen3_5TextConfig(**size, num_hidden_layers=layers, layer_types=kinds, tie_word_embeddings=True)


def falcon_mamba(few: bool) -> Any:
    from transformers import FalconMambaConfig

    size = {"hidden_size": 4_096, "intermediate_size": 8_192, "vocab_size": 65_024}
    if TOY:
        size = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 199}
    return FalconMambaConfig(**size, state_size=16, num_hidden_layers=2 if few or TOY else 64)


def documents() -> list[np.ndarray]:
    """480 documents of mean 243 and at most 2,048 tokens."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(243) - 0.28, 0.75, 24 if TOY else 480), 16, LONGEST).astype(int)
    return [generator.integers(1, 199 if TOY else 100_000, n) for n in lengths]


def batches(rows: str, docs: list[np.ndarray], capacity: int, padded: int = 8) -> list[Batch]:
    """Batches on the device.

    Args:
        rows: "padded"; "packed"; "fixed", packed into fixed shapes; "stock", packed without what only we take.
        capacity: of packed rows.
        padded: documents in a padded batch.
    """
    if rows == "padded":
        groups = [docs[i : i + padded] for i in range(0, len(docs), padded)]
        return [_padded(group) for group in groups]
    planned = pack(docs, tight(docs, capacity))
    fixed = {"max_seqlen": LONGEST, "bucket": -(-capacity // 64)} if rows == "fixed" else {}
    collate = PackedCollator(**fixed)
    found = []
    for row in range(len(planned)):
        batch = collate(planned[row : row + 1])
        if rows == "stock":
            batch = {name: x for name, x in batch.items() if name not in ("packed_lengths", "seq_idx")}
        found.append({name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in batch.items()})
    return found


def tight(docs: list[np.ndarray], capacity: int) -> PackPlan:
    """The plan of the least capacity that needs no more rows: full rows, as a whole corpus would give."""
    lengths = [len(d) for d in docs]
    found = plan(lengths, capacity, seed=0)
    for smaller in range(-(-sum(lengths) // found.n_rows // 64) * 64, capacity, 64):
        if smaller >= max(lengths) and (shorter := plan(lengths, smaller, seed=0)).n_rows == found.n_rows:
            return shorter
    return found


def _padded(group: list[np.ndarray]) -> Batch:
    longest = max(map(len, group))
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, document in enumerate(group):
        ids[i, : len(document)], mask[i, : len(document)] = torch.from_numpy(document), 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: x.to(DEVICE) for name, x in batch.items()}


def make_model(shape: Shape, attention: str | None, few: bool, dtype: torch.dtype = DTYPE) -> Any:
    """The same random weights every time; ``few``: with few layers; ``attention``: the shape's if None."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            shape.make(few), attn_implementation=attention or shape.attention, dtype=DTYPE
        )
    model = model.to(dtype)
    return (shape.adapters or with_adapters)(model).base_model.model if shape.lora else model


def with_adapters(model: Any) -> Any:
    """The model under PEFT, with adapters of rank 16 on all projections of its layers, in its own dtype."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets, init_lora_weights=False))
    return adapted.to(model.dtype)
