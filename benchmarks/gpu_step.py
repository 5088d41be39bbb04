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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from benchmarks.clock import (
    DEVICE,
    DTYPE,
    QUICK,
    TOY,
    StepClock,
    allocated_gib,
    matrix_rate,
    relative_error,
    waits,
)
from benchmarks.harness import Figures, free, measured
from benchmarks.report import Result
from benchmarks.shapes import config
from benchmarks.workload import LONGEST, RATE, Batch, Shape, batches, documents, make_model
from torch_backend import patch
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.packed_tokens import plain
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
    shape = Shape("toy" if TOY else "Qwen2-0.5B", partial(config, "Qwen2-0.5B"), (256,) if TOY else (16_384, 65_536))
    yield from race(shape, [c for c in CONTENDERS if not TOY or c.name in TOY_RUNS])


def run_hybrid() -> Iterator[Result]:
    """The Qwen3.5 shape, 8 layers of which 6 scan; stock scans by ``fla`` if it is there, in plain torch otherwise."""
    for contender in HYBRID_CONTENDERS:
        steps = 8 if contender.name.startswith("ours") and not TOY else 2  # a scan in plain torch takes seconds a step
        shape = Shape("Qwen3.5 hybrid, 8 layers", partial(config, "Qwen3.5"), HYBRID_ROWS, steps=steps)
        yield from race(shape, [contender])


def race(shape: Shape, contenders: Sequence[Contender]) -> Iterator[Result]:
    """Every contender at every capacity of the shape that it takes."""
    for contender in contenders:
        capacities = (0,) if contender.rows == "padded" else contender.capacities or shape.capacities
        for capacity in capacities:
            if capacity and capacity not in shape.capacities:
                continue
            case = f"rows of {capacity:,}" if capacity else f"padded, batches of {shape.padded}"
            with _left_as_it_was(shape):
                yield from measured(
                    f"step, {shape.name}", case, contender.name, RATE,
                    partial(_train, shape, contender, capacity),
                    partial(error, shape, contender, capacity),
                    partial(allowed, shape),
                )  # fmt: skip


# -- the contenders ----------------------------------------------------------------------------------------------------


def stock(model: Any) -> Loss:
    return lambda batch: model(**plain(batch), use_cache=False).loss  # with all that stock packing passes


def stock_liger(model: Any, **options: bool) -> Loss:
    from liger_kernel.transformers import monkey_patch

    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    fused = {"rms_norm": True, "swiglu": True, "rope": True, "fused_linear_cross_entropy": True}
    apply(model=model, **{"cross_entropy": False, **fused, **options})
    return stock(model)


def ours(model: Any, implementation: str) -> Loss:
    patch(model, implementation=implementation, verify=False)

    def loss(batch: Mapping[str, Any]) -> Tensor:
        total, weight = causal_lm_loss(model, batch)
        return total / weight

    return loss


def ours_alone(model: Any) -> Loss:
    """Nothing but torch: neither flash-attn-4 nor Liger."""
    return ours(model, "sdpa" if TOY else "triton")


def ours_compiled(model: Any, alone: Callable[[Any], Loss] = ours_alone, memory: Level = "none") -> Loss:
    loss = alone(model)
    with torch.no_grad():
        loss(batches("fixed", documents()[:8], 8 * LONGEST)[0])  # asks the implementations
    set_level(model, memory)
    backend = lookup_backend("aot_eager") if TOY else "inductor"
    compile_layers(model, backend=backend, memory=memory)
    for layer in level_layers(model):
        layer.gradient_checkpointing = False  # compiled layers recompute by themselves
    return loss


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
    Contender("ours, torch alone", ours_alone, capacities=(16_384, 8_192, 256)),
    Contender("ours, captured", ours_alone, "fixed", captured=True, capacities=(16_384, 256)),
    Contender("padded, SDPA", stock, "padded"),
    Contender("stock packed, SDPA", stock, "stock", capacities=(16_384, 256)),
]
HYBRID_CONTENDERS = [
    Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True),
    Contender("ours, captured", ours_alone, "fixed", captured=True),
    Contender("ours", ours_alone),
    Contender("stock packed: SDPA, metadata", stock, "stock"),
    Contender("padded, SDPA, scan as installed", stock, "padded"),
    Contender("padded, SDPA, scan in plain torch", without_fla(stock), "padded"),
]
TOY_RUNS = {c.name for c in CONTENDERS if "Liger" not in c.name}


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
        more = torch.autograd.grad(loss, _trained(model), materialize_grads=True)  # indexers have none
        gradients = [x + y for x, y in zip(gradients, more)] if gradients else [x.float() for x in more]
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


def _train(shape: Shape, contender: Contender, capacity: int) -> Figures:
    free()
    before = allocated_gib()
    model = make_model(shape, contender.attention, few=QUICK)
    loss = contender.loss(model)
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-5, fused=True, capturable=not TOY)

    def step(batch: Mapping[str, Any]) -> Tensor:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        return value.detach()

    run = CapturedStep(step, enabled=contender.captured and not TOY)
    timed = batches(contender.rows, documents(), capacity, shape.padded)[: min(shape.steps, 3 if QUICK else 16)]
    clock = StepClock(min(WARM_UP, shape.steps + 2), max(1, min(8, shape.steps) // len(timed)) * len(timed))
    value = clock.loop(run, cycle(timed))
    if not bool(torch.isfinite(value)):
        raise FloatingPointError("the loss is not finite after training")
    rate = clock.in_timed([_real_tokens(batch) for batch in timed]) / clock.seconds
    figures = {RATE: rate, "ms per step": clock.ms}
    if not TOY:
        figures |= {
            "GiB allocated at most": clock.peak - before,
            "GiB reserved": torch.cuda.memory_reserved() / 2**30 - before,
            "share of the measured matrix rate": _operations(model, shape) * rate / matrix_rate(),
            **_inspect(run, timed[0]),
        }
    return figures | {"last loss": float(value)}


def _real_tokens(batch: Batch) -> int:
    """Every document has one label fewer than tokens, and padding has none."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    trained = batch["labels"].flatten() != -100
    segment = (batch["position_ids"].flatten() == 0).cumsum(0)
    return int(trained.sum()) + len(segment[trained].unique())


def _operations(model: Any, shape: Shape) -> float:
    """Counts a token's FLOPs of products with weights: forward, gradients of activations and of trained weights.

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
    return 2.0 * (2 * size + trained)


def _visited(config: Any) -> float:
    """The share of its experts that a token visits."""
    experts = next((n for name in ("num_experts", "num_local_experts") if (n := getattr(config, name, None))), 1)
    return getattr(config, "num_experts_per_tok", experts) / experts


def _inspect(run: CapturedStep, batch: Batch) -> dict[str, float]:
    """Launches from the host and synchronisations of one step."""
    waited = waits(lambda: run(batch))
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
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
