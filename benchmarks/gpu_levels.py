"""Compares the memory that is told beforehand with what a training step takes, at every level of memory.

    python -m benchmarks.gpu_levels                        # Qwen2-0.5B shape, whole, Llama-3-8B shape with LoRA
    python -m benchmarks.gpu_levels --match llama --levels full offload --tokens 32768
    python -m benchmarks.gpu_levels --auto                 # what memory="auto" takes, at growing rows until none fits
    python -m benchmarks.gpu_levels --longest --match window --steps 2   # the longest document that the formula allows
    python -m benchmarks.gpu_levels --match window --document --levels offload --tokens 131072 --host 12  # shared
    python -m benchmarks.gpu_levels --match gpt_oss --document --levels full offload   # experts by tiles
    python -m benchmarks.gpu_levels --match whole --layers 4 --document --levels offload --tokens 1200000 --steps 1
    python -m benchmarks.gpu_levels --match whole --layers 4 --document --levels full --tokens 131072 --tiles mlp
    python -m benchmarks.gpu_levels --match llama --levels full --tokens 32768 --history   # what is alive at the peak
    python -m benchmarks.gpu_levels --budget 500           # seconds after which nothing new is begun
    python -m benchmarks.gpu_levels --tiny                 # on the CPU, to see that it runs

Each level and length of row runs in a process of its own: five steps of ``make_train_step`` on one row of documents of
2,048 tokens, or with ``--document`` on one document. Measured is the most that was allocated, and beside it the most
that the allocator reserved, which it gives back before it fails. The shape ``window`` is that of Llama-3-8B with
attention over 1,024 tokens, whose memory is the same and whose time grows with the document and not with its square;
``whole`` trains all its weights, by an optimizer without states, which stands for one whose states are on the host.
``--layers`` takes fewer of them, and ``--host`` as much less of the host's memory as they need less. ``--tiles`` limits
what long rows compute by tiles, to see what that costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import torch

from benchmarks._memory_history import begin_history, end_history
from benchmarks._report import table
from benchmarks.gpu_clock import DEVICE, TOY
from benchmarks.gpu_workload import LONGEST, Shape, llama3, make_model, qwen2, with_adapters
from packing_core import pack
from packing_core.training.memory_model import GIB, LEVELS
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.steps import memory_fit, tiled_layers
from torch_backend.steps.memory import level_of
from torch_backend.steps.memory_fit import device_bytes, memory_of


def windowed(few: bool) -> Any:
    from transformers import MistralConfig

    sizes = llama3(few).to_dict()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    same = {name: sizes[name] for name in (*names, "vocab_size", "max_position_embeddings", "tie_word_embeddings")}
    return MistralConfig(**same, sliding_window=1_024)


def gpt_oss(few: bool) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4)


SHAPES = {
    "qwen2": (Shape("Qwen2-0.5B", qwen2, (256,) if TOY else (16_384, 65_536)), False),
    "llama": (Shape("Llama-3-8B, LoRA", qwen2 if TOY else llama3, (256,) if TOY else (8_192, 32_768)), True),
    "window": (Shape("Llama-3-8B with a window, LoRA", qwen2 if TOY else windowed, (256,) if TOY else (65_536,)), True),
    "whole": (Shape("Llama-3-8B with a window", qwen2 if TOY else windowed, (256,) if TOY else (65_536,)), False),
    "gpt_oss": (Shape("gpt-oss-20b, LoRA", qwen2 if TOY else gpt_oss, (256,) if TOY else (65_536,)), True),
}
LONGEST_BY_FORMULA = 0  # as a number of tokens


def with_layers(make: Any, layers: int | None) -> Any:
    """``make`` of a config with so many layers."""

    def fewer(few: bool) -> Any:
        config = make(few)
        for each in [config] * (layers is not None):
            each.num_hidden_layers = layers
            each.layer_types = getattr(each, "layer_types", None) and each.layer_types[:layers]
        return config

    return fewer


def limit_tiles(parts: str) -> None:
    """Lets long rows compute MLPs and experts alone by tiles, without their norms, or nothing."""
    found = tiled_layers.can_be_tiled
    kept: dict[str, Any] = {
        "mlp": lambda model: {m: tiled_layers.Tiles() for m in found(model) if not hasattr(m, "q_proj")},
        "none": lambda model: {},
    }
    tiled_layers.can_be_tiled = kept.get(parts, found)


def measure(name: str, level: str, tokens: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """The figures of one level: predicted and measured GiB, seconds of the first step, tokens per second."""
    shape, lora = SHAPES[name]
    shape = replace(shape, make=with_layers(shape.make, chosen.layers))
    document, steps = chosen.document or chosen.longest, chosen.steps
    limit_tiles(chosen.tiles)
    model = make_model(shape, "eager" if name == "gpt_oss" and not TOY else "sdpa", few=False)  # which has no sinks
    model = patch(with_adapters(model) if lora else model, verify=False).train()
    made = torch.optim.SGD if name == "whole" else torch.optim.AdamW
    optimizer: Any = made(model.parameters(), lr=1e-5, fused=True)
    predicted = memory_of(model, optimizer)
    if tokens == LONGEST_BY_FORMULA:
        there = 2**24 if TOY else device_bytes(DEVICE)
        tokens = predicted.longest(level, there or 0, memory_fit.host_bytes()) // 64 * 64
    length = tokens if document else min(LONGEST, tokens)
    vocabulary = int(model.config.vocab_size)
    docs = [np.random.default_rng(i).integers(1, vocabulary, length) for i in range(tokens // length)]
    batch = PackedCollator(model, max_seqlen=length)(pack(docs, tokens))
    step = make_train_step(model, optimizer, max_grad_norm=1.0, memory=level)  # type: ignore[arg-type]
    times = []
    for number in range(steps):
        if chosen.history and number == steps - 1:
            begin_history()
        began = time.perf_counter()
        loss = float(step(batch)["loss"])
        times.append(time.perf_counter() - began)
    if chosen.history:
        print(end_history(tokens), file=sys.stderr)
    used = level_of(model) if level == "auto" else level
    group = step._gradients.host.group
    return {
        "level": used if group == 1 else f"{used}, one input for {group} layers",
        "tokens": tokens,
        "predicted": predicted.bytes(used, tokens, group=group) / GIB,
        "allocated": 0.0 if TOY else torch.cuda.max_memory_allocated() / GIB,
        "reserved": 0.0 if TOY else torch.cuda.max_memory_reserved() / GIB,
        "first": times[0],
        "rate": tokens / min(times),
        "loss": loss,
        "graph": step.parts["graph"],
    }


def cases(chosen: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    for name in SHAPES:
        if chosen.match in name:
            sizes = [chosen.tokens] if chosen.tokens else list(SHAPES[name][0].capacities)
            if chosen.longest:
                sizes = [LONGEST_BY_FORMULA]
            if chosen.auto:
                sizes = [sizes[0] * 2**i for i in range(1 if TOY else 8)]
                yield from product([name], ["auto"], sizes)
            else:
                yield from ((name, level, size) for size in sizes for level in chosen.levels)


def row(name: str, level: str, tokens: int, found: dict[str, Any] | str) -> list[str]:
    if isinstance(found, str):
        return [name, level, f"{tokens:,}", found, *[""] * 6]
    allocated = found["allocated"]
    ratio = f"{found['predicted'] / allocated:.3f}" if allocated else "-"
    tokens = found["tokens"]
    figures = [f"{found['predicted']:.2f}", f"{allocated:.2f}", ratio, f"{found['reserved']:.2f}"]
    figures += [f"{found['rate']:,.0f}", f"{found['first']:.0f}", f"{found['loss']:.4f}"]
    return [name, found["level"], f"{tokens:,}", *figures]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--match", default="", help="shapes whose name has this in it: qwen2, llama, window, whole")
    options.add_argument("--levels", nargs="+", default=list(LEVELS))
    options.add_argument("--tokens", type=int, help="of the row")
    options.add_argument("--document", action="store_true", help="one document as long as the row")
    options.add_argument("--longest", action="store_true", help="one document, the longest that fits by the formula")
    options.add_argument("--host", type=float, help="GiB of the host for offloading, where it shall be less than it is")
    options.add_argument("--layers", type=int, help="of the model, where it shall have fewer")
    options.add_argument(
        "--tiles", choices=("all", "mlp", "none"), default="all", help="what long rows compute by tiles"
    )
    options.add_argument("--steps", type=int, default=5, help="of each process")
    options.add_argument("--history", action="store_true", help="print what is alive at the peak of the last step")
    options.add_argument("--budget", type=float, default=float("inf"), help="seconds for all of it")
    options.add_argument("--auto", action="store_true", help='memory="auto", at rows of twice the length each time')
    options.add_argument("--limit", type=float, default=150, help="seconds for a process")
    options.add_argument("--tiny", action="store_true", help="on the CPU, to see that it runs")
    options.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.one:
        name, level, tokens = chosen.one
        if chosen.host:
            memory_fit.host_bytes = lambda: int(chosen.host * GIB)
        print("\n" + json.dumps(measure(name, level, int(tokens), chosen)))
        return
    if not TOY:
        print(torch.cuda.get_device_name(), torch.__version__, DEVICE, flush=True)
    lines, ends = [], time.monotonic() + chosen.budget
    for name, level, tokens in cases(chosen):
        if (limit := min(chosen.limit, ends - time.monotonic())) < 0:
            print(f"{name} | {level} | {tokens:,} | not run: out of time", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_levels", "--one", name, level, str(tokens)]
        command += ["--steps", str(chosen.steps), *["--document"] * (chosen.document or chosen.longest)]
        command += ["--host", str(chosen.host)] * bool(chosen.host)
        command += ["--layers", str(chosen.layers)] * bool(chosen.layers)
        command += ["--tiles", chosen.tiles]
        command += ["--history"] * chosen.history
        command += ["--tiny"] * TOY
        try:
            done = subprocess.run(command, timeout=limit, capture_output=True, text=True)
            if chosen.history:
                print("\n".join(line for line in done.stderr.splitlines() if line.startswith("|")), flush=True)
            said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
            found = json.loads(said[0]) if done.returncode == 0 else f"{said[0][:200] if said else 'failed'}"
        except subprocess.TimeoutExpired:
            found = f"no end after {limit:.0f} s"
        lines.append(row(name, level, tokens, found))
        print(" | ".join(lines[-1]), flush=True)
    header = [
        "shape",
        "level",
        "tokens",
        "predicted GiB",
        "allocated",
        "ratio",
        "reserved",
        "tokens/s",
        "first step, s",
        "loss",
    ]
    print("\n" + table(header, lines))


if __name__ == "__main__":
    main()
