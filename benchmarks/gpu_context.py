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
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks._launch import add_options, compared, launch, trained
from benchmarks.gpu import collected, parsed, parser
from benchmarks.gpu_clock import DEVICE, TOY, Result, seconds_left, synchronize, waits
from benchmarks.gpu_workload import DTYPE, falcon_mamba, llama3, qwen2, qwen35
from packing_core import Cost, context_plan, pack
from torch_backend import PackedCollator, explain, make_train_step, patch

SHAPES = {"llama": qwen2 if TOY else llama3, "hybrid": qwen35, "mamba": falcon_mamba}
LAYERS = {"llama": 2 if TOY else 4, "hybrid": 4 if TOY else 8, "mamba": 2 if TOY else 8}
METHODS = ("auto", "keys", "heads")
SIGMA = 1.55  # of the logarithm of a document's length


@dataclass(frozen=True)
class Contender:
    """The set-up of a contender.

    Attributes:
        ranks: over which the row is cut.
        method: how attention of straddling documents crosses them.
        compiled: whether layers are compiled where they can be.
    """

    ranks: int
    method: str = "auto"
    compiled: bool = True

    @property
    def name(self) -> str:
        which = "one rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.method}"
        return which if self.compiled else f"{which}, layers as they are"


@dataclass
class Measured:
    """The results of a contender's processes.

    Attributes:
        ms: of a step; host_ms: until the call of a step returns, on rank 0.
        peak: the largest of a rank, in GiB.
    """

    ms: float
    host_ms: float
    peak: float
    waits: int | None
    loss: float
    layers: str
    crossing: str


def contenders(ranks: int) -> list[Contender]:
    """The most important first."""
    several = [Contender(ranks, method) for method in METHODS]
    return [Contender(1), *several, Contender(1, compiled=False), Contender(ranks, compiled=False)]


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


def train(contender: Contender, chosen: argparse.Namespace) -> Measured:
    """Run by every process of a contender."""
    from transformers import AutoModelForCausalLM

    mesh = None
    if contender.ranks > 1:
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        dist.init_process_group("gloo" if TOY else "nccl")
        mesh = init_device_mesh(DEVICE.type, (contender.ranks,), mesh_dim_names=("cp",))
    config = config_of(chosen)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    model = patch(model.train(), verify=False, mesh=mesh, context_method=contender.method)
    wrapped = model
    if mesh is not None:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = make_train_step(
        wrapped,
        SGDThatKeepsGradients(model.parameters(), lr=1e-6),
        compile="auto" if contender.compiled else False,
        capture=False,
        memory=chosen.memory,
    )
    batch = batch_of(model, lengths_of(chosen.row, chosen.mean, chosen.sigma), config.vocab_size)
    for _ in range(1 if chosen.short else 2):  # compile, and DDP makes its buckets anew
        step(batch)
    held = 0 if TOY else torch.cuda.memory_allocated()
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    on_host = []
    if mesh is not None:
        dist.barrier()
    synchronize()
    start = time.perf_counter()
    for _ in range(chosen.steps):
        begin = time.perf_counter()
        loss = step(batch)["loss"]
        on_host.append(time.perf_counter() - begin)
    synchronize()
    seconds = (time.perf_counter() - start) / chosen.steps
    peak = torch.tensor(0 if TOY else torch.cuda.max_memory_allocated() - held, device=DEVICE)
    if mesh is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    crossing = next((layer.request for layer in explain(model).layers if "straddl" in layer.request), "")
    return Measured(
        ms=seconds * 1e3,
        host_ms=statistics.median(on_host) * 1e3,
        peak=float(peak) / 2**30,
        waits=None if chosen.short else waits(lambda: step(batch)),
        loss=float(loss),
        layers=step.parts["layers"],
        crossing=crossing.rpartition("; ")[2],
    )


def config_of(chosen: argparse.Namespace) -> Any:
    config, layers = SHAPES[chosen.shape](True), chosen.layers
    if chosen.shape == "hybrid":
        config.layer_types = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    elif chosen.shape == "llama" and getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    config.num_hidden_layers = layers
    return config


def batch_of(model: Any, lengths: list[int], vocabulary: int) -> dict[str, Any]:
    random = np.random.default_rng(1)
    rows = pack([random.integers(1, vocabulary, length) for length in lengths], sum(lengths))
    return PackedCollator(model)([rows[0]])


def launched(contender: Contender, chosen: argparse.Namespace) -> list[Result]:
    """Starts the processes of a contender; its figures, or why it has none."""
    names = ("shape", "row", "mean", "layers", "steps", "memory", "sigma")
    arguments = [text for name in names for text in (f"--{name}", str(getattr(chosen, name)))]
    arguments += ["--short"] * chosen.short
    limit = min(chosen.limit, seconds_left())
    section = f"context parallelism, {chosen.shape} shape of {chosen.layers} layers" + " as a toy" * TOY
    lengths = lengths_of(chosen.row, chosen.mean, chosen.sigma)
    documents = f"{len(lengths)} documents" if len(lengths) > 1 else "one document"
    case = f"{chosen.row:,} tokens, {documents}, memory={chosen.memory}"
    found = launch("benchmarks.gpu_context", contender.ranks, asdict(contender), arguments, limit)
    if isinstance(found, str):
        return [Result(section, case, contender.name, None, "real tokens/s", found)]
    measured = Measured(**found)
    plan = context_plan(lengths, contender.ranks, cost=Cost.from_config(config_of(chosen)))
    figures = {
        "real tokens/s": chosen.row / measured.ms * 1e3,
        "ms per step": measured.ms,
        "ms of the host in the call": measured.host_ms,
        "GiB of activations": measured.peak,
    }
    if measured.waits is not None:
        figures["host waits"] = measured.waits
    cost = f"slowest rank at {plan.imbalance:.3f} of the mean, by cost"
    note = "; ".join(filter(None, (f"loss {measured.loss:.6f}", cost, f"layers {measured.layers}", measured.crossing)))
    return [Result(section, case, contender.name, value, unit, note) for unit, value in figures.items()]


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    add_options(options)
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
    options.add_argument("--limit", type=float, default=150, help="seconds for a contender")
    chosen = parsed(options, arguments)
    chosen.mean = chosen.mean or chosen.row // 16
    chosen.layers = chosen.layers or LAYERS[chosen.shape]
    if trained(chosen, lambda contender: train(Contender(**contender), chosen)):
        return []
    found = compared(contenders(chosen.ranks), lambda contender: launched(contender, chosen))
    return collected(found, chosen.output, "context")


if __name__ == "__main__":
    main()
