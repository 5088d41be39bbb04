"""The whole training step: random weights, bfloat16, fused AdamW, the same documents for every contender.

480 documents of mean 243 and at most 2,048 tokens are padded in batches of eight or packed into rows; a step is one
batch or one row. Tokens per second count real tokens: neither padding nor repeated ones. A contender's gradients on a
two-layer model of the same shape are compared with those of each document alone in float32 before it is timed.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_clock import DEVICE, QUICK, TOY, Result, gated, matrix_rate, relative_error, synchronize
from packing_core import pack, plan
from torch_backend import PackedCollator, patch
from torch_backend.captured import CapturedStep
from torch_backend.causal_lm_loss import causal_lm_loss
from torch_backend.metadata import PackedMetadata

LIMIT = 5e-2  # of all gradients in norm; bfloat16 noise is near 1e-2, contamination above 2e-1
LONGEST = 64 if TOY else 2_048
DTYPE = torch.float32 if TOY else torch.bfloat16
Batch = dict[str, Any]
Loss = Callable[[Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Shape:
    """A model's shape and how it is trained."""

    name: str
    make: Callable[[bool], Any]  # two layers or all of them -> config
    capacities: Sequence[int]
    lora: bool = False
    padded: int = 8


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: in the table.
        loss: (model) -> (batch -> mean loss), after changing the model as it needs.
        rows: "packed", "padded", or "stock" for packed rows without what only a patched model takes.
        attention: the name that transformers is given.
        captured, capacities: run as a CUDA graph; only rows of these capacities.
        inspected: count launches and synchronisations.
    """

    name: str
    loss: Callable[[Any], Loss]
    rows: str = "packed"
    attention: str = "sdpa"
    captured: bool = False
    capacities: Sequence[int] = ()
    inspected: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def run() -> Iterator[Result]:
    if TOY:
        yield from race(Shape("toy", lambda few: _qwen2(few), (256,)), [c for c in CONTENDERS if c.name in TOY_RUNS])
        return
    yield from race(Shape("Qwen2-0.5B", _qwen2, (16_384, 65_536)), CONTENDERS)
    few = [c for c in CONTENDERS if c.name in LORA_RUNS]
    yield from race(Shape("Llama-3-8B, LoRA", _llama3, (16_384,), lora=True), few)
    few = [c for c in CONTENDERS if c.name in HYBRID_RUNS]
    yield from race(Shape("Qwen3.5 hybrid", _qwen35, (16_384,)), few)


def race(shape: Shape, contenders: Sequence[Contender]) -> Iterator[Result]:
    for contender in contenders:
        for capacity in (0,) if contender.rows == "padded" else contender.capacities or shape.capacities:
            if capacity and capacity not in shape.capacities:
                continue
            case = f"padded, batches of {shape.padded}" if not capacity else f"rows of {capacity:,}"
            with _left_as_it_was(shape):
                figures, note = gated(
                    lambda contender=contender: _error(shape, contender),
                    LIMIT,
                    lambda contender=contender, capacity=capacity: _train(shape, contender, capacity),
                )
            _clear()
            if not figures:
                yield Result(f"step, {shape.name}", case, contender.name, None, "real tokens/s", note)
            for unit, value in figures.items():
                yield Result(f"step, {shape.name}", case, contender.name, value, unit, note)


# -- the contenders ----------------------------------------------------------------------------------------------------


def stock(model: Any) -> Loss:
    return lambda batch: model(**batch, use_cache=False).loss


def stock_liger(model: Any) -> Loss:
    _liger(model, rope=True, fused_linear_cross_entropy=True)
    return stock(model)


def ours(model: Any, implementation: str = "auto") -> Loss:
    patch(model, implementation=implementation, verify=False)

    def loss(batch: Mapping[str, Any]) -> Tensor:
        total, weight = causal_lm_loss(model, batch)
        return total / weight

    return loss


def ours_alone(model: Any) -> Loss:
    return ours(model, "sdpa" if TOY else "triton")


def ours_liger(model: Any) -> Loss:
    _liger(model, rope=False, fused_linear_cross_entropy=False)
    return ours(model, "triton")


def ours_compiled(model: Any) -> Loss:
    loss = ours_alone(model)
    loss(_batches("packed", documents()[:8], 2 * LONGEST)[0])  # asks the implementations before the compiler looks on
    return torch.compile(loss)


def ours_rebuilt(model: Any) -> Loss:
    loss = ours_alone(model)

    def forgetful(batch: Mapping[str, Any]) -> Tensor:
        derived = PackedMetadata.derived
        PackedMetadata.derived = lambda packed, key, make: make(packed)  # type: ignore[method-assign]
        try:
            return loss(batch)
        finally:
            PackedMetadata.derived = derived  # type: ignore[method-assign]

    return forgetful


CONTENDERS = [
    Contender("padded, SDPA", stock, rows="padded"),
    Contender("stock packed, SDPA", stock, rows="stock", capacities=(16_384, 256)),
    Contender("best stock: flash-attn-4, metadata, Liger", stock_liger, "stock", "flash_attention_4", inspected=True),
    Contender("ours, torch alone", ours_alone, inspected=True),
    Contender("ours, work lists rebuilt in every layer", ours_rebuilt, capacities=(16_384,)),
    Contender("ours, captured", ours_alone, captured=True, inspected=True),
    Contender("ours with Liger's norms and MLP, captured", ours_liger, captured=True),
    Contender("ours, compiled and captured", ours_compiled, captured=True),
]
LORA_RUNS = {CONTENDERS[i].name for i in (2, 3, 6)}
HYBRID_RUNS = {CONTENDERS[i].name for i in (0, 3)}
TOY_RUNS = {CONTENDERS[i].name for i in (0, 1, 3, 4, 5)}


def _liger(model: Any, **options: bool) -> None:
    from liger_kernel.transformers import monkey_patch

    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    apply(model=model, cross_entropy=False, rms_norm=True, swiglu=True, **options)


# -- what is trained ---------------------------------------------------------------------------------------------------


def _qwen2(few: bool) -> Any:
    from transformers import Qwen2Config

    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    if not TOY:
        size = {"hidden_size": 896, "intermediate_size": 4_864, "num_attention_heads": 14, "num_key_value_heads": 2}
    layers = 2 if few or TOY else 24
    return Qwen2Config(
        **size, num_hidden_layers=layers, vocab_size=199 if TOY else 151_936, tie_word_embeddings=True,
        layer_types=["full_attention"] * layers, max_position_embeddings=32_768,
    )  # fmt: skip


def _llama3(few: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4_096, intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=2 if few else 32, vocab_size=128_256, tie_word_embeddings=False,
        max_position_embeddings=8_192,
    )  # fmt: skip


def _qwen35(few: bool) -> Any:
    from transformers import Qwen3_5TextConfig

    layers = 4 if few else 24
    return Qwen3_5TextConfig(
        hidden_size=1_024, intermediate_size=3_584, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
        num_hidden_layers=layers, linear_num_key_heads=16, linear_num_value_heads=16, vocab_size=248_320,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), tie_word_embeddings=True,
    )  # fmt: skip


def documents() -> list[np.ndarray]:
    """480 documents of mean 243 and at most 2,048 tokens."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(243) - 0.28, 0.75, 24 if TOY else 480), 16, LONGEST).astype(int)
    return [generator.integers(1, 199 if TOY else 100_000, n) for n in lengths]


def _batches(rows: str, docs: list[np.ndarray], capacity: int, padded: int = 8) -> list[Batch]:
    """Batches on the device, of one form for all rows."""
    if rows == "padded":
        groups = [docs[i : i + padded] for i in range(0, len(docs), padded)]
        return [_padded(group) for group in groups]
    planned = pack(docs, plan([len(d) for d in docs], capacity, seed=0))
    bucket = -(-capacity // 128)
    collate = PackedCollator(max_seqlen=LONGEST, bucket=bucket)
    batches = []
    for row in range(len(planned)):
        batch = collate(planned[row : row + 1])
        if rows == "stock":
            batch = {name: x for name, x in batch.items() if name not in ("packed_lengths", "seq_idx")}
        batches.append({name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in batch.items()})
    return batches


def _padded(group: list[np.ndarray]) -> Batch:
    longest = max(map(len, group))
    ids = torch.zeros(len(group), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, document in enumerate(group):
        ids[i, : len(document)], mask[i, : len(document)] = torch.from_numpy(document), 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: x.to(DEVICE) for name, x in batch.items()}


def _model(shape: Shape, attention: str, few: bool, dtype: torch.dtype = DTYPE) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(shape.make(few), attn_implementation=attention, dtype=DTYPE)
    model = model.to(dtype)
    if not shape.lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets, init_lora_weights=False))
    return adapted.to(dtype).base_model.model


# -- measuring ---------------------------------------------------------------------------------------------------------


def _error(shape: Shape, contender: Contender) -> float:
    """Of the gradients of one row on a two-layer model, against each document alone in float32."""
    docs = [d[:300] for d in documents()[:6]]
    model = _model(shape, "sdpa", few=True, dtype=torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    total = sum(len(d) - 1 for d in docs)
    for document in docs:
        ids = torch.from_numpy(document)[None].to(DEVICE)
        (model(input_ids=ids, labels=ids, use_cache=False).loss * (len(document) - 1) / total).backward()
    right = torch.cat([p.grad.flatten() for p in trained])
    del model, trained
    model = _model(shape, contender.attention, few=True)
    loss = contender.loss(model)
    (batch,) = _batches(contender.rows, docs, sum(map(len, docs)) + 5, padded=len(docs))
    loss(batch).backward()
    return relative_error(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]), right)


def _train(shape: Shape, contender: Contender, capacity: int) -> dict[str, float]:
    _clear()
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    docs = documents()
    model = _model(shape, contender.attention, few=QUICK)
    loss = contender.loss(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True, capturable=contender.captured and not TOY)

    def step(batch: Mapping[str, Any]) -> Tensor:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        return value.detach()

    run = CapturedStep(step, enabled=contender.captured and not TOY)
    timed = _batches(contender.rows, docs, capacity, shape.padded)[: 3 if QUICK else 12]
    for i in range(5):
        run(timed[i % len(timed)])
    synchronize()
    rounds = max(1, 8 // len(timed))
    begin = time.perf_counter()
    for _ in range(rounds):
        for batch in timed:
            value = run(batch)
    synchronize()
    seconds = (time.perf_counter() - begin) / rounds
    if not bool(torch.isfinite(value)):
        raise FloatingPointError("the loss is not finite after training")
    real = sum(_real_tokens(batch) for batch in timed)
    figures = {"real tokens/s": real / seconds, "ms per step": seconds / len(timed) * 1e3}
    if not TOY:
        figures["GiB peak"] = torch.cuda.max_memory_allocated() / 2**30
        figures["share of the measured matrix rate"] = _operations(model, shape, real) / seconds / matrix_rate()
        if contender.inspected:
            figures |= _inspect(run, timed[0])
    return figures


def _real_tokens(batch: Batch) -> int:
    """Every document has one label fewer than tokens, and padding has none."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    trained = batch["labels"].flatten() != -100
    segment = (batch["position_ids"].flatten() == 0).cumsum(0)
    return int(trained.sum()) + len(segment[trained].unique())


def _operations(model: Any, shape: Shape, tokens: int) -> float:
    """Of the matrix products with weights: forward, gradient of activations, and gradient of what is trained."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    size = sum(p.numel() for p in matrices)
    if model.config.tie_word_embeddings:
        size += model.get_output_embeddings().weight.numel()
    trained = sum(p.numel() for p in matrices if p.requires_grad)
    if not shape.lora:
        trained = size
    return 2.0 * tokens * (2 * size + trained)


def _inspect(run: CapturedStep, batch: Batch) -> dict[str, float]:
    """Launches from the host and synchronisations of one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run(batch)
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(w.message) for w in caught)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as seen:
        run(batch)
        torch.cuda.synchronize()
    launches = sum(e.count for e in seen.key_averages() if "Launch" in e.key and e.key.startswith("cu"))
    return {"launches per step": float(launches), "synchronisations per step": float(waits)}


@contextmanager
def _left_as_it_was(shape: Shape) -> Iterator[None]:
    """Undo what Liger does to transformers' modules, so that the next contender is what its name says."""
    kind = shape.make(True).model_type.removesuffix("_text")
    modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
    names = dict(vars(modeling))
    methods = {
        cls: dict(vars(cls)) for cls in names.values() if isinstance(cls, type) and cls.__module__ == modeling.__name__
    }
    try:
        yield
    finally:
        vars(modeling).update(names)
        for cls, before in methods.items():
            for name, value in vars(cls).copy().items():
                if name in before and before[name] is not value:
                    setattr(cls, name, before[name])


def _clear() -> None:
    gc.collect()
    torch._dynamo.reset()
    if not TOY:
        torch.cuda.empty_cache()
