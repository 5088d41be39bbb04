"""Context parallelism on several GPUs against one: rows of many documents, or one document as long as the row.

    python -m benchmarks.gpu_context                               # 2 GPUs, Llama-8B shape, 4 layers, a row of 65,536
    python -m benchmarks.gpu_context --shape hybrid                # Qwen3.5 shape, 8 layers
    python -m benchmarks.gpu_context --shape mamba --mean 65536    # Falcon-Mamba shape, 8 layers, one document
    python -m benchmarks.gpu_context --row 262144 --mean 262144 --memory full --layers 2 --steps 2    # one document
    python -m benchmarks.gpu_context --ranks 8 --row 1048576 --mean 65536 --memory full --layers 1 --steps 1 --short
    python -m benchmarks.gpu_context --match auto --budget 120 --output results
    python -m benchmarks.gpu_context --tiny                        # two processes on the CPU by gloo

Every contender trains random weights on the same row by ``make_train_step``, in bfloat16 and in processes of its own:
one rank alone, and all ranks, whose straddling documents exchange keys and values, heads (Ulysses), or what sends less.
Tokens per second are real ones of all ranks together, over steps that follow each other as in training; memory is the
largest peak of a rank beyond weights and gradients, which stay allocated between steps, as DDP holds them; host waits
are those of one step on rank 0, and its time in the call shows whether the GPU waits for the host. Lengths of documents
are lognormal with sigma 1.55, as those of source files. NCCL's streams have a high priority, as
docs/context-parallel.md says, unless TORCH_NCCL_HIGH_PRIORITY=0 is set. Where a step takes a minute, ``--short`` warms
up by one step and leaves host waits out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.clock import DEVICE, TOY, StepClock, allocated_gib, header, waits
from benchmarks.harness import NOTE, Figures, parsed, parser
from benchmarks.launch import add_options, compared, trained
from benchmarks.report import Result, collected
from benchmarks.shapes import config
from benchmarks.workload import RATE, random_model
from packing_core import Cost, context_plan, pack
from torch_backend import PackedCollator, explain, make_train_step, patch

# name -> shape, layers
SHAPES = {
    "llama": ("Qwen2-0.5B" if TOY else "Llama-3-8B", 4),
    "hybrid": ("Qwen3.5", 8),
    "mamba": ("Falcon-Mamba", 8),
}
METHODS = ("auto", "keys", "heads")
SIGMA = 1.55  # of the logarithm of a document's length


@dataclass(frozen=True)
class Contender:
    """The set-up of a contender.

    Attributes:
        ranks: over which the row is cut.
        method: how attention of straddling documents crosses them.
    """

    ranks: int
    method: str = "auto"

    @property
    def name(self) -> str:
        return "one rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.method}"


def lengths_of(row: int, mean: int, sigma: float = SIGMA) -> list[int]:
    """Documents that fill a row; one alone if their mean length is that of the row."""
    if mean >= row:
        return [row]
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 8 * row // mean)
    ends = np.cumsum(drawn.astype(int).clip(2, row))
    count = int(np.searchsorted(ends, row))
    return np.diff([0, *ends[:count], row]).tolist()


class SGDThatKeepsGradients(torch.optim.SGD):
    """Sets gradients to zero in place, so that they count as held on one rank as in DDP's buckets on several."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=set_to_none)


def train(contender: Contender, chosen: argparse.Namespace) -> Figures:
    """Run by every process of a contender."""
    mesh = None
    if contender.ranks > 1:
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        dist.init_process_group("gloo" if TOY else "nccl")
        mesh = init_device_mesh(DEVICE.type, (contender.ranks,), mesh_dim_names=("cp",))
    model = random_model(config(SHAPES[chosen.shape][0], layers=chosen.layers))
    model = patch(model.train(), verify=False, mesh=mesh, context_method=contender.method)
    wrapped = model
    if mesh is not None:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = make_train_step(
        wrapped,
        SGDThatKeepsGradients(model.parameters(), lr=1e-6),
        capture=False,
        memory=chosen.memory,
    )
    lengths = lengths_of(chosen.row, chosen.mean, chosen.sigma)
    batch = batch_of(model, lengths, model.config.vocab_size)
    clock = StepClock(1 if chosen.short else 2, chosen.steps)  # compile, and DDP makes its buckets anew
    on_host, before_step = list[float](), 0.0

    def timed(batch: Any) -> Any:
        nonlocal before_step
        if len(on_host) == clock.warm_up:
            before_step = allocated_gib()
        begin = time.perf_counter()
        sums = step(batch)
        on_host.append(time.perf_counter() - begin)
        return sums

    loss = clock.loop(timed, repeat(batch))["loss"]
    peak = torch.tensor(clock.timed_peak - before_step, device=DEVICE)
    if mesh is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    crossing = next((layer.request for layer in explain(model).layers if "straddl" in layer.request), "")
    imbalance = context_plan(lengths, contender.ranks, cost=Cost.from_config(model.config)).imbalance
    cost = f"slowest rank at {imbalance:.3f} of the mean, by cost"
    notes = f"loss {float(loss):.6f}", cost, f"layers {step.parts['layers']}", crossing.rpartition("; ")[2]
    return {
        RATE: chosen.row / clock.ms * 1e3,
        "ms per step": clock.ms,
        "ms of the host in the call": statistics.median(on_host[clock.warm_up :]) * 1e3,
        "GiB of activations": float(peak),
        **({} if chosen.short else {"host waits": waits(lambda: step(batch))}),
        NOTE: "; ".join(filter(None, notes)),
    }


def batch_of(model: Any, lengths: list[int], vocabulary: int) -> dict[str, Any]:
    random = np.random.default_rng(1)
    rows = pack([random.integers(1, vocabulary, length) for length in lengths], sum(lengths))
    return PackedCollator(model)([rows[0]])


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    add_options(options, limit=150)
    options.add_argument("--shape", choices=SHAPES, default="llama")
    options.add_argument("--row", type=int, default=512 if TOY else 65_536, help="tokens")
    options.add_argument("--mean", type=int, help="tokens of a document; a sixteenth of the row if left out")
    options.add_argument("--sigma", type=float, default=SIGMA, help="of the lognormal lengths; 0 for equal ones")
    options.add_argument("--layers", type=int, help="4 of Llama's if left out, 8 of Qwen3.5's and of Falcon-Mamba's")
    options.add_argument("--memory", default="none", help="the level of memory, see make_train_step")
    options.add_argument(
        "--steps", type=int, default=2 if TOY else 6, help="timed ones, after two others and before one"
    )
    options.add_argument("--short", action="store_true", help="one step before the timed ones, and none after them")
    chosen = parsed(options, arguments)
    chosen.mean = chosen.mean or chosen.row // 16
    chosen.layers = chosen.layers or SHAPES[chosen.shape][1]
    if trained(chosen, lambda contender: train(Contender(**contender), chosen)):
        return []
    lengths = lengths_of(chosen.row, chosen.mean, chosen.sigma)
    section = f"context parallelism, {chosen.shape} shape of {chosen.layers} layers" + " as a toy" * TOY
    count = f"{len(lengths)} documents" if len(lengths) > 1 else "one document"
    case = f"{chosen.row:,} tokens, {count}, memory={chosen.memory}"
    racing = [Contender(1), *(Contender(chosen.ranks, method) for method in METHODS)]
    results = compared("benchmarks.gpu_context", section, case, racing, chosen)
    return collected(results, header(), chosen.output, "context")


if __name__ == "__main__":
    main()
