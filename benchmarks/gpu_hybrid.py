"""The whole training step of a hybrid: the Qwen3.5 shape, 8 layers of which 6 scan, rows of 16,384 tokens, mean 243.

    python -m benchmarks.gpu --only hybrid              # ours, and what the installed peers do as they are found
    python -m benchmarks.gpu_hybrid --budget 120        # the same, one JSON line per contender
    python -m benchmarks.gpu_hybrid --profile           # the kernels of one captured step, by time, as one JSON line

Peers are transformers with what is installed: ``fla`` scans if it is there, plain torch otherwise. A contender that
raises, or whose gradients are those of contaminated documents, has no figure and says so.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_clock import TOY, Result, set_budget, set_match
from benchmarks.gpu_step import Contender, ours_alone, ours_compiled, prepared, race, stock, without_fla
from benchmarks.gpu_workload import Shape, qwen35

SHAPE = Shape("Qwen3.5 hybrid, 8 layers", qwen35, (256,) if TOY else (16_384,), steps=2 if TOY else 8)
COMPILED = Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True)
CONTENDERS = [
    COMPILED,
    Contender("ours, captured", ours_alone, "fixed", captured=True),
    Contender("ours", ours_alone),
    Contender("stock packed: SDPA, metadata", stock, "stock"),
    Contender("padded, SDPA, scan as installed", stock, "padded"),
    Contender("padded, SDPA, scan in plain torch", without_fla(stock), "padded"),
]
_SHOWN = 60  # kernels of a profile


def run() -> Iterator[Result]:
    for contender in CONTENDERS:
        # What scans in plain torch takes seconds a step.
        slow = contender not in CONTENDERS[:3]
        yield from race(replace(SHAPE, steps=2) if slow else SHAPE, [contender])


def profile(contender: Contender = COMPILED) -> dict[str, object]:
    """The kernels of one step: name -> calls and milliseconds, the longest first."""
    step, timed, _ = prepared(SHAPE, contender, SHAPE.capacities[0])
    for i in range(6):
        step(timed[i % len(timed)])
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        step(timed[0])
        if not TOY:
            torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels[event.name[:90]]
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us() / 1e3
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "contender": contender.name,
        "milliseconds of kernels": round(sum(ms for _, (_, ms) in longest), 2),
        "kernels": [[name, calls, round(ms, 3)] for name, (calls, ms) in longest[:_SHOWN]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only contenders whose name this pattern matches")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--profile", action="store_true", help="the kernels of one step in place of its speed")
    options = parser.parse_args()
    set_match(options.match)
    if options.budget:
        set_budget(options.budget)
    if options.profile:
        print(json.dumps(profile()), flush=True)
        return
    for result in run():
        print(json.dumps(result.as_dict()), flush=True)


if __name__ == "__main__":
    main()
