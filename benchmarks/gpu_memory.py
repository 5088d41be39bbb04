"""Traces the GPU memory of ``crosspack train``: stage by stage, and what is alive when it holds most.

:mod:`benchmarks.gpu_levels` compares the memory of every level with what is told beforehand.

    python -m benchmarks.gpu_memory                        # Qwen2-0.5B shape, rows of 16,384, three kinds of weights
    python -m benchmarks.gpu_memory --weights master --chunk 0.5   # chunks of the loss of 0.5 GiB and not of 1
    python -m benchmarks.gpu_memory --tiny                 # on the CPU, to see that it runs

Each kind of weights trains in a process of its own. Stages end where the trainer reports one and after every step;
"at most" is the most between two of them. What is alive at the peak is found by replaying the allocator's history,
which is recorded for the first steps; the last steps are timed without it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import replace

import torch

from benchmarks._memory_history import begin_history, end_history
from benchmarks.gpu_clock import TOY
from benchmarks.gpu_workload import documents, qwen2
from packing_core import plan
from packing_core.training.job import TrainJob
from packing_core.training.options import Options
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Corpus, Document, Schedule
from torch_backend.job.train import train
from torch_backend.ops.linear_cross_entropy import linear_cross_entropy

WEIGHTS = {
    "autocast": {"precision": "bfloat16"},
    "bfloat16": {"precision": "bfloat16", "dtype": "bfloat16"},
    "master": {"precision": "bfloat16", "dtype": "bfloat16", "master_weights": True},
}
TRACED, STEPS = 5, 20  # steps: the first ones compile and record, with the allocator's history
GIB = 2**30


def job(weights: str) -> TrainJob:
    docs = documents() * 4
    corpus = Corpus.collect(Document(d.astype("int32"), d >= 0) for d in docs)
    rows = plan(corpus.documents.lengths, 256 if TOY else 16_384, seed=0)
    schedule = Schedule(corpus, (rows,), rows_per_step=1, limit=TRACED + 1 if TOY else STEPS)
    return TrainJob(model=qwen2(False).to_dict(), schedule=schedule, options=Options(lr=1e-5, **WEIGHTS[weights]))  # type: ignore[arg-type]


def measure(weights: str) -> None:
    """Train, and print a line for each stage and a table of the peak."""
    stage, rates, steps = "", [], 0

    def ended(next_stage: str) -> None:
        nonlocal stage
        if stage and not TOY:
            now, most, reserved = (
                size() / GIB
                for size in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
            )
            print(f"{now:6.2f} GiB, at most {most:6.2f}, reserved {reserved:6.2f} | {stage}", flush=True)
            torch.cuda.reset_peak_memory_stats()
        stage = next_stage

    def on_step(record: StepRecord) -> None:
        nonlocal steps
        steps += 1
        if steps <= TRACED + 1:
            ended(f"step {steps + 1}")
        if steps > TRACED + 3:
            rates.append(record.tokens / record.seconds)
        if steps == TRACED:
            print(end_history(), flush=True)

    begin_history()
    result = train(replace(job(weights), on_phase=ended, on_step=on_step))
    speed = f"{statistics.median(rates):,.0f} real tokens/s, " if rates else ""
    print(f"{speed}{result.peak_bytes.get('packed', 0) / GIB:.2f} GiB by the trainer's own count, {result.device}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    options.add_argument("--chunk", type=float, help="GiB of the loss's chunks of logits")
    options.add_argument("--limit", type=float, default=120, help="seconds for a process")
    options.add_argument("--tiny", action="store_true", help="on the CPU, to see that it runs")
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.one:
        if chosen.chunk:
            assert linear_cross_entropy.__kwdefaults__ is not None
            linear_cross_entropy.__kwdefaults__["chunk_bytes"] = int(chosen.chunk * GIB)
        measure(chosen.weights[0])
        return
    for weights in chosen.weights:
        print(f"\n-- {weights}" + (f", chunks of {chosen.chunk} GiB" if chosen.chunk else ""), flush=True)
        more = [*(["--chunk", str(chosen.chunk)] if chosen.chunk else []), *["--tiny"] * TOY]
        command = [sys.executable, "-m", "benchmarks.gpu_memory", "--one", "--weights", weights, *more]
        try:
            subprocess.run(command, timeout=chosen.limit)
        except subprocess.TimeoutExpired:
            print(f"no end after {chosen.limit} s", flush=True)


if __name__ == "__main__":
    main()
