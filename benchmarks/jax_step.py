"""Tokens per second of ``make_train_step`` on a decoder of Qwen2-0.5B's shape, on one device or over meshes of several.

    python -m benchmarks.jax_step                            # five ways to hold activations, one GPU
    python -m benchmarks.jax_step --match "^scanned$"        # one of them: the peak is then its own
    python -m benchmarks.jax_step --devices 2 --match "^scanned$"   # data parallel and fully sharded, beside one device
    python -m benchmarks.jax_step --compile                  # seconds of compiling, nothing runs

Random weights, bfloat16 compute with float32 master weights, AdamW, rows of 16,384 tokens packed from documents of mean
length 243 and at most 2,048 tokens, one row a step. With several devices each step has as many rows as there are
devices; one device alone takes those, and also one row a step, which is what each device of the mesh has to do. Losses
never make whole logits. Each mesh of several devices first takes the same three steps as one device alone, and their
losses are compared.

"Planned" memory is what XLA plans for the compiled step, arguments included. The peak is the process's so far: ways are
measured from the least memory to the most.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import packing_core
from benchmarks._report import machine, versions, write_json
from jax_backend import make_train_step
from jax_backend.batches import to_batch
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.train_step import TrainStep

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


def run(
    config: DecoderConfig, match: str, devices: int, *, among: str = "", toy: bool, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield what is to be written after each case; print a line for each."""
    meshes: dict[str, dict[str, int]] = {"one device": {}}
    if devices > 1:
        meshes |= {
            ONE_ROW: {},
            f"data parallel over {devices}": {"data": devices},
            f"fully sharded over {devices}": {"fsdp": devices},
        }
    batches = make_batches(devices, 128 if toy else 16_384, config.vocab_size)
    single = [{name: x[:1] for name, x in batch.items()} for batch in batches]
    results: list[dict[str, Any]] = []
    for way in filter(re.compile(match).search, WAYS):
        alone: dict[str, Any] | None = None
        one_row: dict[str, Any] | None = None
        for mesh, axes in ((mesh, axes) for mesh, axes in meshes.items() if re.search(among, mesh)):
            pool = ThreadPoolExecutor(1)
            result: dict[str, Any] = {"way": way, "mesh": mesh}
            try:
                future = pool.submit(measure, config, WAYS[way], single if mesh == ONE_ROW else batches, axes)
                result |= future.result(max(deadline - time.perf_counter(), 0.01))
                alone = alone or result
                result["ratio"] = result["tokens_per_second"] / alone["tokens_per_second"]
                same_rows = alone if mesh != ONE_ROW else result
                result["difference"] = float(np.max(np.abs(np.divide(result["losses"], same_rows["losses"]) - 1)))
                result["status"] = "ok" if result["difference"] <= SAME_LOSS else "WRONG: another loss"
                one_row = result if mesh == ONE_ROW else one_row
                if one_row:
                    result["of_one_row"] = result["tokens_per_second"] / one_row["tokens_per_second"]
            except TimeoutError:
                result["status"] = "NOT RUN: out of time"
            except Exception as error:  # the other cases are still worth their figures
                result["status"] = f"NOT RUN: {type(error).__name__}: {str(error)[:200]}"
            results.append(result)
            print(line(result), flush=True)
            yield {"step": results}


def line(result: dict[str, Any]) -> str:
    name = f"{result['way']}, {result['mesh']}"
    if result["status"] != "ok":
        return f"{name}: {result['status']}"
    losses = ", ".join(f"{loss:.4f}" for loss in result["losses"])
    further = f", {result['of_one_row']:.2f} of one device with a row a step" if "of_one_row" in result else ""
    return (
        f"{name}: {result['tokens_per_second']:,.0f} real tokens/s, {result['ratio']:.2f} of one device{further} "
        f"({result['step_ms']:.0f} ms a step of {result['documents']} documents; planned {result['planned_gib']:.1f} "
        f"GiB a device, peak so far {result['peak_gib']:.1f} GiB); compiled in {result['compile_s']:.0f} s; losses "
        f"{losses}, from one device's by {result['difference']:.1e}"
    )


def step_of(config: DecoderConfig, options: dict[str, Any], axes: dict[str, int]) -> TrainStep:
    """The step of a decoder that is made array by array: one program for all of them would take long to compile."""
    count = int(np.prod([*axes.values(), 1]))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count]) if axes else None
    return make_train_step(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, **options), optax.adamw(1e-4), mesh)


def compile_cold(config: DecoderConfig, match: str, *, toy: bool) -> Iterator[dict[str, Any]]:
    """Seconds until the step of a row can run, each way by itself."""
    seconds: dict[str, float] = {}
    for way in filter(re.compile(match).search, WAYS):
        step = step_of(config, WAYS[way], {})
        begin = time.perf_counter()
        step.compile(rows=1, tokens=128 if toy else 16_384)
        seconds[way] = time.perf_counter() - begin
        print(f"{way}, {config.num_hidden_layers} layers: traced and compiled in {seconds[way]:.1f} s", flush=True)
        yield {"compile_s": seconds}


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
) -> dict[str, Any]:
    """Compile, take three steps and record their losses, then time more of them."""
    train_step = step_of(config, options, axes)
    begin = time.perf_counter()
    compiled = train_step.compile(rows=len(batches[0]["input_ids"]), tokens=batches[0]["input_ids"].shape[1])
    seconds_to_compile = time.perf_counter() - begin
    memory = compiled.memory_analysis()
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
        for batch in placed:
            state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - begin) / len(batches))
    seconds = statistics.median(times[1:])
    real = sum(int(np.count_nonzero(batch["segment_ids"])) for batch in batches) / len(batches)
    assert train_step.compilations == 1, "a new segmentation must not recompile"
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", float("nan"))
    return {
        "tokens_per_second": real / seconds,
        "step_ms": seconds * 1e3,
        "documents": sum(int(batch["segment_ids"].max(axis=1).sum()) for batch in batches) // len(batches),
        "planned_gib": (planned + memory.temp_size_in_bytes) / 2**30,
        "peak_gib": peak / 2**30,
        "compile_s": seconds_to_compile,
        "losses": losses,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", metavar="PATTERN", help="ways whose name it matches")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument(
        "--meshes", default="", metavar="PATTERN", help="of several devices: those whose name it matches"
    )
    parser.add_argument("--compile", action="store_true", help="only compile, and say how long it took")
    parser.add_argument("--seconds", type=float, default=140.0, help="begin nothing after this long")
    parser.add_argument("--output", type=Path, help="file of JSON, rewritten after each measurement")
    parser.add_argument("--toy", action="store_true", help="tiny shapes; only to see that everything runs")
    options = parser.parse_args(arguments)
    header = [
        f"{machine()}; {len(jax.devices())} x {jax.devices()[0].device_kind}",
        versions("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax"),
    ]
    print("\n".join(header), flush=True)
    config = DecoderConfig.from_hf(TOY if options.toy else QWEN)
    if options.compile:
        parts = compile_cold(config, options.match, toy=options.toy)
    else:
        parts = run(
            config,
            options.match,
            options.devices,
            among=options.meshes,
            toy=options.toy,
            deadline=begin + options.seconds,
        )
    for part in parts:
        write_json(options.output, {"header": header, **part}, begin)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
