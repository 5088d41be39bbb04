"""The workload of training benchmarks: models with random weights, documents, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.clock import DEVICE, DTYPE, TOY
from benchmarks.harness import free
from packing_core import PackPlan, pack, plan
from torch_backend import PackedCollator

PLACES = [Path(__file__).parents[up] / "shared" / "data" / "gsm8k_train.jsonl" for up in (1, 2)]
GSM8K = PLACES[0] if PLACES[0].exists() else PLACES[1]
LONGEST = 64 if TOY else 2_048
RATE = "real tokens/s"
LEARNING_RATE = 1e-5
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
        return [on_device(_padded(docs[i : i + padded])) for i in range(0, len(docs), padded)]
    planned = pack(docs, tight(docs, capacity))
    fixed: dict[str, Any] = {"max_seqlen": LONGEST, "bucket": -(-capacity // 64)} if rows == "fixed" else {}
    collate = PackedCollator(**fixed)
    only_ours = ("packed_lengths", "seq_idx") if rows == "stock" else ()
    collated = (collate(planned[row : row + 1]) for row in range(len(planned)))
    return [on_device({name: x for name, x in batch.items() if name not in only_ours}) for batch in collated]


def on_device(batch: Batch) -> Batch:
    return {name: x.to(DEVICE, non_blocking=True) if isinstance(x, Tensor) else x for name, x in batch.items()}


def tight(docs: list[np.ndarray], capacity: int) -> PackPlan:
    """The plan of the least capacity that needs no more rows: full rows, as a whole corpus would give."""
    lengths = [len(d) for d in docs]
    widest = plan(lengths, capacity, seed=0)
    for smaller in range(-(-sum(lengths) // widest.n_rows // 64) * 64, capacity, 64):
        if smaller >= max(lengths) and (shorter := plan(lengths, smaller, seed=0)).n_rows == widest.n_rows:
            return shorter
    return widest


def _padded(group: list[np.ndarray]) -> Batch:
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(document) for document in group], True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(document)] for document in group])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def random_model(config: Any, attention: str = "sdpa", dtype: torch.dtype = DTYPE, seed: int = 0) -> Any:
    """A model on the device with the same random weights every time; what was compiled for another one is forgotten."""
    from transformers import AutoModelForCausalLM

    torch._dynamo.reset()
    free()
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def make_model(shape: Shape, attention: str | None, few: bool, dtype: torch.dtype = DTYPE) -> Any:
    """A shape's model, of few layers or all; ``attention``: the shape's if None."""
    model = random_model(shape.make(few), attention or shape.attention).to(dtype)  # the same weights in every dtype
    return (shape.adapters or with_adapters)(model).base_model.model if shape.lora else model


def with_adapters(model: Any) -> Any:
    """The model under PEFT, with adapters of rank 16 on all projections of its layers, in its own dtype."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets, init_lora_weights=False))
    return adapted.to(model.dtype)


def trainer_options(steps: int, **more: Any) -> dict[str, Any]:
    """Arguments of every trainer of transformers and TRL."""
    return {
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": TOY,
        **more,
    }


def tokenizer() -> Any:
    """A tokenizer of nothing but special tokens, for trainers that take one also with data that are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(4)}, unk_token="<3>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>", unk_token="<3>")
