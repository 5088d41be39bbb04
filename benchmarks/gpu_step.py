"""The whole training step: random weights, bfloat16, fused AdamW, the same documents for every contender.

480 documents of mean 243 and at most 2,048 tokens are padded in batches of eight, or packed into the fewest rows of a
capacity, evened out so that the rows are full, as those of a whole corpus are; a step is one batch or one row. Tokens
per second count real tokens: neither padding nor repeated ones. Before it is timed, a contender's gradients on a model
of the same shape with few layers are compared with those of each document alone in float32; captured ones after a
replay on other boundaries than were recorded. It may be off by twice what the stock model is off on each document
alone in bfloat16.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from benchmarks.gpu_clock import (
    DEVICE,
    QUICK,
    TOY,
    Result,
    free,
    gated,
    matrix_rate,
    relative_error,
    synchronize,
    waits,
    wanted,
)
from benchmarks.gpu_workload import (
    DTYPE,
    LONGEST,
    Batch,
    Shape,
    batches,
    documents,
    llama3,
    make_model,
    qwen2,
    qwen35,
)
from torch_backend import patch
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.packed_tokens import plain
from torch_backend.segments import PackedMetadata
from torch_backend.steps.cuda_graph import CapturedStep, compile_layers
from torch_backend.steps.memory import Level, level_layers, set_level

HYBRID_ROWS = (256,) if TOY else (16_384,)
NOISE = 2.0  # times the error of bfloat16 itself; contamination is tens of times
WARM_UP = 5  # steps of every contender, of which a captured one runs three as usual
Loss = Callable[[Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: in the table.
        loss: (model) -> (batch -> mean loss), after changing the model as it needs.
        rows: "padded"; "stock" for rows with what a stock model takes; "packed" for what a patched one takes; "fixed"
            for the latter in shapes that do not change.
        attention: the name that transformers is given; the shape's if None.
        captured: run as a CUDA graph.
        capacities: only rows of these.
    """

    name: str
    loss: Callable[[Any], Loss]
    rows: str = "packed"
    attention: str | None = None
    captured: bool = False
    capacities: Sequence[int] = ()


def run() -> Iterator[Result]:
    """The shape that the targets are about."""
    if TOY:
        yield from race(Shape("toy", qwen2, (256,)), [c for c in CONTENDERS if c.name in TOY_RUNS])
    else:
        yield from race(Shape("Qwen2-0.5B", qwen2, (16_384, 65_536)), CONTENDERS)


def run_others() -> Iterator[Result]:
    """Larger and other shapes."""
    if TOY:
        yield from race(Shape("toy, LoRA", qwen2, (256,), lora=True), [c for c in CONTENDERS if c.name in TOY_RUNS])
        return
    few = [c for c in CONTENDERS if c.name in LORA_RUNS]
    yield from race(Shape("Llama-3-8B, LoRA", llama3, (8_192,), lora=True, steps=6), few)


def run_hybrid() -> Iterator[Result]:
    """The Qwen3.5 shape, 8 layers of which 6 scan; stock scans by ``fla`` if it is there, in plain torch otherwise."""
    for contender in HYBRID_CONTENDERS:
        steps = 8 if contender.name.startswith("ours") and not TOY else 2  # a scan in plain torch takes seconds a step
        yield from race(Shape("Qwen3.5 hybrid, 8 layers", qwen35, HYBRID_ROWS, steps=steps), [contender])


def race(shape: Shape, contenders: Sequence[Contender]) -> Iterator[Result]:
    for contender in contenders:
        if not wanted(contender.name):
            continue
        for capacity in (0,) if contender.rows == "padded" else contender.capacities or shape.capacities:
            if capacity and capacity not in shape.capacities:
                continue
            case = f"padded, batches of {shape.padded}" if not capacity else f"rows of {capacity:,}"
            with _left_as_it_was(shape):
                figures, note = gated(
                    lambda contender=contender, capacity=capacity: error(shape, contender, capacity),
                    lambda: allowed(shape),
                    lambda contender=contender, capacity=capacity: _train(shape, contender, capacity),
                )
            torch._dynamo.reset()
            free()
            if not figures:
                yield Result(f"step, {shape.name}", case, contender.name, None, "real tokens/s", note)
            for unit, value in figures.items():
                yield Result(f"step, {shape.name}", case, contender.name, value, unit, note)


# -- the contenders ----------------------------------------------------------------------------------------------------


def stock(model: Any) -> Loss:
    return lambda batch: model(**plain(batch), use_cache=False).loss  # with all that stock packing passes


def stock_liger(model: Any, **options: bool) -> Loss:
    _liger(model, rope=True, fused_linear_cross_entropy=True, **options)
    return stock(model)


def stock_checkpointing(model: Any, *, liger: bool = True) -> Loss:
    """As stock, under the gradient checkpointing of transformers."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return stock_liger(model) if liger else stock(model)


def ours(model: Any, implementation: str) -> Loss:
    patch(model, implementation=implementation, verify=False)

    def loss(batch: Mapping[str, Any]) -> Tensor:
        total, weight = causal_lm_loss(model, batch)
        return total / weight

    return loss


def ours_alone(model: Any) -> Loss:
    """Nothing but torch: neither flash-attn-4 nor Liger."""
    return ours(model, "sdpa" if TOY else "triton")


def ours_liger(model: Any) -> Loss:
    _liger(model, rope=False, fused_linear_cross_entropy=False)
    return ours(model, "triton")


def ours_compiled(
    model: Any, recompute: bool = True, alone: Callable[[Any], Loss] = ours_alone, memory: Level = "none"
) -> Loss:
    loss = alone(model)
    with torch.no_grad():
        loss(batches("fixed", documents()[:8], 8 * LONGEST)[0])  # asks the implementations
    set_level(model, memory)
    backend = lookup_backend("aot_eager") if TOY else "inductor"
    compile_layers(model, recompute=recompute, backend=backend, memory=memory)
    for layer in level_layers(model):
        layer.gradient_checkpointing = False  # compiled layers recompute by themselves
    return loss


def ours_kept(model: Any) -> Loss:
    return ours_compiled(model, recompute=False)


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


def without_fla(loss: Callable[[Any], Loss]) -> Callable[[Any], Loss]:
    """As ``loss``, with the scan in plain torch, as transformers runs it where fla is not installed."""

    def plain(model: Any) -> Loss:
        modeling = import_module(type(model).__module__)
        if hasattr(modeling, SCAN):
            setattr(modeling, SCAN, inspect.unwrap(getattr(modeling, SCAN)))
        return loss(model)

    return plain


SCAN = "torch_chunk_gated_delta_rule"
BEST_STOCK = "best stock: flash-attn-4, metadata, Liger"
CONTENDERS = [
    Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True),
    Contender(BEST_STOCK, stock_liger, "stock", "flash_attention_4"),
    Contender(
        "ours, compiled and captured, more activations kept", ours_kept, "fixed", captured=True, capacities=(65_536,)
    ),
    Contender("ours, torch alone", ours_alone, capacities=(16_384, 8_192, 256)),
    Contender("ours, captured", ours_alone, "fixed", captured=True, capacities=(16_384, 256)),
    Contender("ours with Liger's norms and MLP, captured", ours_liger, "fixed", captured=True),
    Contender("padded, SDPA", stock, "padded"),
    Contender("stock packed, SDPA", stock, "stock", capacities=(16_384, 256)),
    Contender("ours, work lists rebuilt in every layer", ours_rebuilt, capacities=(16_384, 256)),
]
HYBRID_CONTENDERS = [
    Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True),
    Contender("ours, captured", ours_alone, "fixed", captured=True),
    Contender("ours", ours_alone),
    Contender("stock packed: SDPA, metadata", stock, "stock"),
    Contender("padded, SDPA, scan as installed", stock, "padded"),
    Contender("padded, SDPA, scan in plain torch", without_fla(stock), "padded"),
]
LORA_RUNS = {BEST_STOCK, "ours, compiled and captured", "ours with Liger's norms and MLP, captured"}
TOY_RUNS = {c.name for c in CONTENDERS if "Liger" not in c.name}


def _liger(model: Any, **options: bool) -> None:
    from liger_kernel.transformers import monkey_patch

    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    apply(model=model, **{"cross_entropy": False, "rms_norm": True, "swiglu": True, **options})


# -- measuring ---------------------------------------------------------------------------------------------------------


@cache
def right_gradients(shape: Shape) -> tuple[Tensor, float]:
    """Gradients of the checked documents, each alone, in float32, and how far bfloat16 is off them."""
    with _left_as_it_was(shape):
        exact = _gradients_alone(shape, torch.float32)
        return exact.cpu(), relative_error(_gradients_alone(shape, DTYPE), exact)


def _gradients_alone(shape: Shape, dtype: torch.dtype) -> Tensor:
    model = make_model(shape, None, few=True, dtype=dtype)
    without_fla(stock)(model)
    docs = checked_documents()
    total = sum(len(d) - 1 for d in docs)
    gradients: list[Tensor] = []
    for document in docs:
        ids = torch.from_numpy(document)[None].to(DEVICE)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (len(document) - 1) / total
        found = torch.autograd.grad(loss, _trained(model), materialize_grads=True)  # indexers have none
        gradients = [x + y for x, y in zip(gradients, found)] if gradients else [x.float() for x in found]
    return torch.cat([x.flatten() for x in gradients])


def allowed(shape: Shape) -> float:
    return 1e-5 if TOY else NOISE * right_gradients(shape)[1]


def checked_documents() -> list[np.ndarray]:
    return [d[: 40 if TOY else 700] for d in documents()[:24]]


def error(shape: Shape, contender: Contender, capacity: int) -> float:
    """Measures the gradients' error of one row, or one padded batch, of all checked documents, on few layers."""
    docs = checked_documents()
    model = make_model(shape, contender.attention, few=True)
    loss = contender.loss(model)
    trained = _trained(model)

    def step(batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(batch), trained, materialize_grads=True)

    run = CapturedStep(step, warm_up=2, enabled=contender.captured and not TOY)
    orders = [docs, docs[1:] + docs[:1], docs[::-1], docs[3:] + docs[:3]] if contender.captured else [docs]
    size = max(capacity, sum(map(len, docs)) + 5)
    for ordered in orders:
        (batch,) = batches(contender.rows, ordered, size, padded=len(docs))
        gradients = run(batch)
    right = right_gradients(shape)[0].to(DEVICE)
    return relative_error(torch.cat([x.flatten() for x in gradients]).float(), right)


def _trained(model: Any) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def prepared(
    shape: Shape, contender: Contender, capacity: int
) -> tuple[CapturedStep, list[Batch], Callable[[], dict[str, float]]]:
    """A contender's step, the batches to time it on, and what gives its figures besides speed, memory from here on."""
    free()
    held = 0
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    model = make_model(shape, contender.attention, few=QUICK)
    loss = contender.loss(model)
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-5, fused=True, capturable=not TOY)

    def step(batch: Mapping[str, Any]) -> Tensor:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        return value.detach()

    def memory() -> dict[str, float]:
        if TOY:
            return {}
        return {
            "GiB allocated at most": (torch.cuda.max_memory_allocated() - held) / 2**30,
            "GiB reserved": (torch.cuda.memory_reserved() - held) / 2**30,
            "operations per token": _operations(model, shape, 1),
        }

    run = CapturedStep(step, enabled=contender.captured and not TOY)
    timed = batches(contender.rows, documents(), capacity, shape.padded)[: min(shape.steps, 3 if QUICK else 16)]
    return run, timed, memory


def _train(shape: Shape, contender: Contender, capacity: int) -> dict[str, float]:
    run, timed, memory = prepared(shape, contender, capacity)
    for i in range(min(WARM_UP, shape.steps + 2)):
        run(timed[i % len(timed)])
    synchronize()
    rounds = max(1, min(8, shape.steps) // len(timed))
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
        figures |= memory()
        figures["share of the measured matrix rate"] = (
            figures.pop("operations per token") * real / seconds / matrix_rate()
        )
        figures |= _inspect(run, timed[0])
    return figures | {"last loss": float(value)}


def _real_tokens(batch: Batch) -> int:
    """Every document has one label fewer than tokens, and padding has none."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    trained = batch["labels"].flatten() != -100
    segment = (batch["position_ids"].flatten() == 0).cumsum(0)
    return int(trained.sum()) + len(segment[trained].unique())


def _operations(model: Any, shape: Shape, tokens: int) -> float:
    """Counts the FLOPs of products with weights: forward, gradients of activations and of trained weights.

    Of a layer of experts, only the weights that a token visits count, and of their adapters likewise.
    """
    matrices = {
        name: p for name, p in model.named_parameters() if p.ndim >= 2 and not re.search(r"embed_tokens|bias$", name)
    }
    visited = _visited(model.config)
    sizes = {name: p.numel() * (visited if ".experts." in name else 1.0) for name, p in matrices.items()}
    size = sum(sizes.values())
    if model.config.tie_word_embeddings:
        size += model.get_output_embeddings().weight.numel()
    trained = sum(sizes[name] for name, p in matrices.items() if p.requires_grad)
    if not shape.lora:
        trained = size
    return 2.0 * tokens * (2 * size + trained)


def _visited(config: Any) -> float:
    """The share of its experts that a token visits."""
    experts = next((n for name in ("num_experts", "num_local_experts") if (n := getattr(config, name, None))), 1)
    return getattr(config, "num_experts_per_tok", experts) / experts


def _inspect(run: CapturedStep, batch: Batch) -> dict[str, float]:
    """Launches from the host and synchronisations of one step."""
    waited = waits(lambda: run(batch))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as seen:
        run(batch)
        torch.cuda.synchronize()
    launches = sum(e.count for e in seen.key_averages() if "Launch" in e.key and e.key.startswith("cu"))
    return {"launches per step": float(launches), "synchronisations per step": float(waited)}


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
