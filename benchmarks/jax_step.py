"""Tokens per second of ``make_train_step`` on a decoder of Qwen2-0.5B's shape, on one device or over meshes of several.

    python -m benchmarks.jax_step                            # five ways to hold activations, one GPU
    python -m benchmarks.jax_step --match "^scanned$"        # one of them: the peak is then its own
    python -m benchmarks.jax_step --devices 2 --match "^scanned$"   # data parallel and fully sharded, beside one device

Random weights, bfloat16 compute with float32 master weights, AdamW, rows of 16,384 tokens packed from documents of mean
length 243 and at most 2,048 tokens, one row a step. With several devices each step has as many rows as there are
devices; one device alone takes those, and also one row a step, which is what each device of the mesh has to do. Losses
never make whole logits. Each mesh of several devices first takes the same three steps as one device alone, and their
losses are compared.

"Planned" memory is what XLA plans for the compiled step, arguments included. The peak is the process's so far: ways are
measured from the least memory to the most.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

if "--tiny" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX looks for devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import packing_core
from benchmarks.harness import NOTE, Figures, measured, parsed, parser
from benchmarks.jax_attention import about
from benchmarks.report import Result, collected
from jax_backend import make_train_step
from jax_backend.batches import to_batch
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.train_step import TrainStep

RATE = "real tokens/s"
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
ONE_ROW = "one device, one row a step"
SAME_LOSS = 2e-3  # relative; bfloat16 sums in another order move the loss by about 1e-4
# options of the decoder, from the least memory to the most
WAYS: dict[str, dict[str, Any]] = {
    "scanned, recomputed": {"scan_layers": True, "remat": "full"},
    "scanned, products and attention kept": {"scan_layers": True, "remat": "dots_and_attention"},
    "scanned": {"scan_layers": True},
    "scanned, contained": {"scan_layers": True, "contain_nonfinite": True},
    "one by one, products and attention kept": {"scan_layers": False, "remat": "dots_and_attention"},
    "one by one": {"scan_layers": False},
}


def run(config: DecoderConfig, devices: int, among: str, capacity: int) -> Iterator[Result]:
    """Every way on every mesh, beside one device with the same rows, and with one row."""
    meshes: dict[str, dict[str, int]] = {"one device": {}}
    if devices > 1:
        meshes |= {
            ONE_ROW: {},
            f"data parallel over {devices}": {"data": devices},
            f"fully sharded over {devices}": {"fsdp": devices},
        }
    batches = make_batches(devices, capacity, config.vocab_size)
    single = [{name: x[:1] for name, x in batch.items()} for batch in batches]
    for way, options in WAYS.items():
        losses: list[list[float]] = []  # of the first mesh
        rates: dict[str, float] = {}

        def beside(
            mesh: str, way: dict[str, Any] = options, losses: list[list[float]] = losses, rates: Any = rates
        ) -> Figures:
            figures = dict(measure(config, way, single if mesh == ONE_ROW else batches, meshes[mesh]))
            if mesh != ONE_ROW:
                losses.append(figures[NOTE])
                difference = float(np.max(np.abs(np.divide(losses[-1], losses[0]) - 1)))
                if not difference <= SAME_LOSS:
                    raise ArithmeticError(f"another loss than on one device: {difference:.1e}")
                figures["losses from one device's"] = difference
            rates[mesh] = figures[RATE]
            ratios = {f"of {other}": rates[mesh] / rates[other] for other in ("one device", ONE_ROW) if other in rates}
            return figures | ratios | {NOTE: "losses " + ", ".join(f"{loss:.4f}" for loss in figures[NOTE])}

        for mesh in (mesh for mesh in meshes if re.search(among, mesh)):
            yield from measured("step", mesh, way, RATE, partial(beside, mesh))


def step_of(config: DecoderConfig, options: dict[str, Any], axes: dict[str, int]) -> TrainStep:
    """The step of a decoder that is made array by array: one program for all of them would take long to compile."""
    count = int(np.prod([*axes.values(), 1]))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count]) if axes else None
    return make_train_step(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, **options), optax.adamw(1e-4), mesh)


def make_batches(rows: int, capacity: int, vocabulary: int) -> list[dict[str, np.ndarray]]:
    """Three batches [rows, capacity] of different segmentations."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(243) - 0.5, 1.0, size=rows * capacity // 40), 8, min(2048, capacity))
    documents = [rng.integers(1, vocabulary, int(n)).astype(np.int32) for n in lengths]
    batch = to_batch(packing_core.pack(documents, capacity))
    assert len(batch["input_ids"]) >= 3 * rows, "too few documents for three batches"
    return [{name: x[i * rows : (i + 1) * rows] for name, x in batch.items()} for i in range(3)]


def measure(
    config: DecoderConfig, options: dict[str, Any], batches: list[dict[str, np.ndarray]], axes: dict[str, int]
) -> Figures:
    """Compiles, takes three steps and records their losses, then times more of them."""
    train_step = step_of(config, options, axes)
    begin = time.perf_counter()
    compiled = train_step.compile(rows=len(batches[0]["input_ids"]), tokens=batches[0]["input_ids"].shape[1])
    seconds_to_compile = time.perf_counter() - begin
    memory: Any = compiled.memory_analysis()
    planned = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    state = train_step.init(donate=True)
    losses = []
    for batch in batches:
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    placed = [train_step.place(batch) for batch in batches]
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for arrays in placed:
            state, metrics = train_step(state, arrays)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - begin) / len(batches))
    seconds = statistics.median(times[1:])
    real = sum(int(np.count_nonzero(batch["segment_ids"])) for batch in batches) / len(batches)
    assert train_step.compilations == 1, "a new segmentation must not recompile"
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", float("nan"))
    return {
        RATE: real / seconds,
        "ms per step": seconds * 1e3,
        "documents per step": sum(int(batch["segment_ids"].max(axis=1).sum()) for batch in batches) // len(batches),
        "planned GiB a device": (planned + memory.temp_size_in_bytes) / 2**30,
        "peak GiB so far": peak / 2**30,
        "s to compile": seconds_to_compile,
        NOTE: losses,
    }


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--devices", type=int, default=1)
    options.add_argument(
        "--meshes", default="", metavar="PATTERN", help="of several devices: those whose name it matches"
    )
    chosen = parsed(options, arguments)
    shape, capacity = (TOY, 128) if chosen.tiny else (QWEN, 16_384)
    results = run(DecoderConfig.from_hf(shape), chosen.devices, chosen.meshes, capacity)
    return collected(results, about(), chosen.output, "jax_step")


if __name__ == "__main__":
    main()
