"""Context parallelism on several GPUs against one: rows of many documents, and one document as long as all of them.

    torchrun --nproc-per-node 2 -m benchmarks.gpu_context                      # Llama-8B shape, 4 layers, bfloat16
    torchrun --nproc-per-node 2 -m benchmarks.gpu_context --hybrid             # Qwen3.5 shape, 8 layers
    torchrun --nproc-per-node 2 -m benchmarks.gpu_context --output FILE.json
    torchrun --nproc-per-node 2 -m benchmarks.gpu_context --tiny               # two processes on the CPU by gloo

Every contender trains random weights on the same rows by ``make_train_step``: one rank alone, with compiled layers and
without, and all ranks, whose straddling documents exchange keys and values, heads (Ulysses), or what sends less. Lines
are the median time of a step, real tokens per second of all ranks together, the ratio to one rank without compiled
layers, and the largest peak of memory of a rank beyond weights and gradients. Gradient checkpointing is on where one
document fills the row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from benchmarks._report import table, versions, write_json
from benchmarks.gpu_clock import TOY
from benchmarks.gpu_workload import DTYPE, llama3, qwen2, qwen35
from packing_core import pack
from torch_backend import PackedCollator, explain, make_train_step, patch

ROW, DOCUMENT = (512, 1_024) if TOY else (65_536, 262_144)
LAYERS = 2 if TOY else 4
METHODS = ("auto", "keys", "heads")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hybrid", action="store_true", help="the shape of Qwen3.5 in place of Llama's")
    options.add_argument("--steps", type=int, default=2 if TOY else 6, help="timed steps, after two others")
    options.add_argument("--output", type=Path, help="a JSON file for the figures, written as they come")
    options.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    chosen = options.parse_args()
    if not TOY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if TOY else "nccl")
    alone = dist.new_group([0])
    mesh = init_device_mesh("cpu" if TOY else "cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    begin, found = time.perf_counter(), dict[str, Any]()
    if dist.get_rank() == 0:
        card = "CPU" if TOY else torch.cuda.get_device_name()
        print(f"{mesh.size()} ranks, {card}, {versions('torch', 'transformers')}", end="\n\n", flush=True)
    rows = {f"rows of {ROW:,}, documents of 4k on average": _lengths(), f"one document of {DOCUMENT:,}": [DOCUMENT]}
    for case, lengths in rows.items():
        lines = []
        for name, figures in _contenders(lengths, alone, mesh, chosen.hybrid, chosen.steps):
            lines.append((name, figures))
            found.setdefault(case, {})[name] = figures
            if dist.get_rank() == 0:
                write_json(chosen.output, found, begin)
        if dist.get_rank() == 0:
            print(case, _table(lines), sep="\n\n", end="\n\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _lengths() -> list[int]:
    """Documents in the shape of source files that fill a row."""
    drawn = np.random.default_rng(0).lognormal(np.log(ROW / 55), 1.55, 4_000).astype(int).clip(2, ROW)
    ends = np.cumsum(drawn)
    count = int(np.searchsorted(ends, ROW))
    return np.diff([0, *ends[:count], ROW]).tolist()


def _contenders(
    lengths: list[int], alone: Any, mesh: Any, hybrid: bool, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the figures of each contender, on every rank in the same order."""
    for name, fast in (("one rank", False), ("one rank, compiled layers", "auto")):
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found = [_tried(lambda fast=fast: _measure(lengths, hybrid, steps, group=alone, fast=fast))]
        dist.broadcast_object_list(found)
        yield name, found[0]
    for method in METHODS:
        own = _tried(lambda method=method: _measure(lengths, hybrid, steps, mesh=mesh, method=method))
        ranks: list[Any] = [None] * mesh.size()
        dist.all_gather_object(ranks, own)
        failed = next((each for each in ranks if "failed" in each), None)
        yield f"{mesh.size()} ranks, {method}", failed or own | {"GiB": max(each["GiB"] for each in ranks)}


def _tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except Exception as error:  # a contender that cannot run has no figure, and the others do
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        if not TOY:
            torch.cuda.empty_cache()


def _measure(
    lengths: list[int],
    hybrid: bool,
    steps: int,
    *,
    mesh: Any = None,
    method: str = "auto",
    group: Any = None,
    fast: Any = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = (qwen35 if hybrid else qwen2 if TOY else llama3)(True)
    if not hybrid:
        config.num_hidden_layers = LAYERS
    with _on_device():
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    model = patch(model.train(), verify=False, mesh=mesh, context_method=method)
    if len(lengths) == 1:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = model if mesh is None else DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    step = make_train_step(wrapped, optimizer, compile=fast, capture=False, group=group)
    batch = _batch(model, lengths, config.vocab_size)
    for _ in range(2):
        step(batch)
    kept = 0 if TOY else torch.cuda.memory_allocated()
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        if mesh is not None:
            dist.barrier()
        _wait()
        begin = time.perf_counter()
        metrics = step(batch)
        _wait()
        times.append(time.perf_counter() - begin)
    peak = 0 if TOY else torch.cuda.max_memory_allocated() - kept
    crossing = next((layer.request for layer in explain(model).layers if "straddling" in layer.request), "")
    return {
        "ms": statistics.median(times) * 1e3,
        "tokens": sum(lengths),
        "GiB": peak / 2**30,
        "loss": float(metrics["loss"]),
        "crossing": crossing.rpartition("; ")[2],
    }


def _batch(model: Any, lengths: list[int], vocabulary: int) -> dict[str, Any]:
    random = np.random.default_rng(1)
    documents = [{"input_ids": random.integers(1, vocabulary, length)} for length in lengths]
    rows = pack([document["input_ids"] for document in documents], sum(lengths))
    return PackedCollator(model)([rows[0]])


@contextmanager
def _on_device() -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device("cpu" if TOY else torch.device("cuda", torch.cuda.current_device()))
    try:
        yield
    finally:
        torch.set_default_device(before)


def _wait() -> None:
    if not TOY:
        torch.cuda.synchronize()


def _table(lines: list[tuple[str, dict[str, Any]]]) -> str:
    header = ("", "ms a step", "tokens/s", "to one", "GiB of activations", "loss")
    base = lines[0][1].get("ms")
    return table(header, [_line(name, figures, base) for name, figures in lines])


def _line(name: str, figures: dict[str, Any], base: float | None) -> list[str]:
    if "failed" in figures:
        return [f"{name}: {figures['failed']}", *[""] * 5]
    ratio = "" if base is None else f"{base / figures['ms']:.2f}"
    speed = figures["tokens"] / figures["ms"] * 1e3
    return [name, f"{figures['ms']:,.1f}", f"{speed:,.0f}", ratio, f"{figures['GiB']:.2f}", f"{figures['loss']:.4f}"]


if __name__ == "__main__":
    main()
