"""Tokens per second of ``make_train_step`` on a decoder of Qwen2-0.5B's shape, on one device or over meshes of several.

Run by ``benchmarks.jax_gpu``. Random weights, bfloat16 compute with float32 master weights, AdamW, rows of 8,192 packed
from documents of mean length 243 and at most 2,048 tokens, two rows a step, or one for each of more devices. Each mesh
of several devices first takes the same three steps as one device alone, and their losses are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import packing_core
from jax_backend import make_train_step
from jax_backend.data import to_batch
from jax_backend.model import Decoder, DecoderConfig

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TOY = QWEN | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TOY |= {"num_attention_heads": 4}
SAME_LOSS = 2e-3  # relative; bfloat16 sums in another order move the loss by about 1e-4
ROWS = 2  # a step


def run(devices: int, *, toy: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield what is to be written after each case; print a line for each."""
    cases: dict[str, dict[str, int]] = {"one device": {}}
    if devices > 1:
        cases |= {
            f"data parallel over {devices}": {"data": devices},
            f"fully sharded over {devices}": {"fsdp": devices},
        }
    batches = make_batches(max(ROWS, devices), 128 if toy else 8192, TOY["vocab_size"] if toy else QWEN["vocab_size"])
    config = DecoderConfig.from_hf(TOY if toy else QWEN)
    results: list[dict[str, Any]] = []
    alone: list[float] | None = None
    for case, axes in cases.items():
        pool = ThreadPoolExecutor(1)
        try:
            future = pool.submit(measure, config, batches, axes)
            result = {"case": case, **future.result(max(deadline - time.perf_counter(), 0.01))}
            alone = alone or result["losses"]
            result["difference"] = float(np.max(np.abs(np.divide(result["losses"], alone) - 1)))
            result["status"] = "ok" if result["difference"] <= SAME_LOSS else "WRONG: another loss than one device's"
        except TimeoutError:
            result = {"case": case, "status": "NOT RUN: out of time"}
        except Exception as error:  # the other cases are still worth their figures
            result = {"case": case, "status": f"NOT RUN: {type(error).__name__}: {str(error)[:200]}"}
        results.append(result)
        print(line(result), flush=True)
        yield {"step": results}


def line(result: dict[str, Any]) -> str:
    if result["status"] != "ok":
        return f"training step, {result['case']}: {result['status']}"
    losses = ", ".join(f"{loss:.4f}" for loss in result["losses"])
    return (
        f"training step, {result['case']}: {result['tokens_per_second']:,.0f} real tokens/s "
        f"({result['step_ms']:.0f} ms a step of {result['documents']} documents, peak {result['peak_gib']:.1f} GiB); "
        f"compiled once in {result['compile_s']:.0f} s; losses {losses}, from one device's by "
        f"{result['difference']:.1e}"
    )


def make_batches(rows: int, capacity: int, vocabulary: int) -> list[dict[str, np.ndarray]]:
    """Three batches [rows, capacity] of different segmentations."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(243) - 0.5, 1.0, size=rows * capacity // 40), 8, min(2048, capacity))
    documents = [rng.integers(1, vocabulary, int(n)).astype(np.int32) for n in lengths]
    batch = to_batch(packing_core.pack(documents, capacity))
    assert len(batch["input_ids"]) >= 3 * rows, "too few documents for three batches"
    return [{name: x[i * rows : (i + 1) * rows] for name, x in batch.items()} for i in range(3)]


def measure(config: DecoderConfig, batches: list[dict[str, np.ndarray]], axes: dict[str, int]) -> dict[str, Any]:
    """Compile, take three steps and record their losses, then time more of them."""
    count = int(np.prod([*axes.values(), 1]))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count]) if axes else None
    train_step = make_train_step(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), optax.adamw(1e-4), mesh)
    state = train_step.init()
    begin = time.perf_counter()
    losses, compiled = [], 0.0
    for batch in batches:
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
        compiled = compiled or time.perf_counter() - begin
    placed = [train_step.place(batch) for batch in batches]
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for batch in placed:
            state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - begin) / len(batches))
    seconds = statistics.median(times)
    real = sum(int(np.count_nonzero(batch["segment_ids"])) for batch in batches) / len(batches)
    assert train_step.compilations == 1, "a new segmentation must not recompile"
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", float("nan"))
    return {
        "tokens_per_second": real / seconds,
        "step_ms": seconds * 1e3,
        "documents": sum(int(batch["segment_ids"].max(axis=1).sum()) for batch in batches) // len(batches),
        "peak_gib": peak / 2**30,
        "compile_s": compiled,
        "losses": losses,
    }
