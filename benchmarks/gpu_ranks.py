"""Trainer with enable_packing, and make_train_step, on several GPUs against one: DDP and FSDP2, rows by cost or not.

    python -m benchmarks.gpu_ranks                      # 2 GPUs, Qwen2-0.5B shape, rows of 16,384, bfloat16
    python -m benchmarks.gpu_ranks --ranks 8 --match FSDP2 --output results
    python -m benchmarks.gpu_ranks --documents 1200 --epochs 2 --limit 60 --budget 140   # what fits into three minutes
    python -m benchmarks.gpu_ranks --ranks 8 --shape experts --match FSDP2 --memory full    # Qwen3-30B-A3B
    python -m benchmarks.gpu_ranks --tiny               # two processes on the CPU by gloo, where nothing is sharded

Every contender trains random weights on the same documents, one row per rank and step, in processes of its own that
torchrun starts, by ``Trainer`` and ``enable_packing`` unless its name says ``make_train_step``. Documents are heavy-
tailed: a lognormal with sigma 1.3, at most as long as a row, so rows of few long documents cost several times as much
attention as rows of many short ones. ``balance`` puts rows of about equal cost into one step, ``equal cost`` makes the
rows for their step, as ``enable_packing(equal_cost=True)`` does, and ``as they come`` leaves the plan's random order.
The first epochs warm up, as many as make 6 steps, and the next ones are timed as a whole, on rank 0 after all ranks
have ended. Tokens per second count real tokens of all ranks; the ratio is to one GPU on the rows as they come.
``--shape experts`` is that of Qwen3-30B-A3B, trained whole by ``make_train_step`` with all its layers sharded, or with
``--layers`` of them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._launch import add_options, compared, launch, trained
from benchmarks.gpu import collected, parsed, parser
from benchmarks.gpu_clock import DEVICE, TOY, Result, highest_gib, seconds_left, synchronize
from benchmarks.gpu_moe_shapes import qwen3 as qwen3_experts
from benchmarks.gpu_workload import DTYPE, qwen2
from packing_core import Cost, PackedDataset, PackPlan, balance, plan
from packing_core.planning.epochs import plan_epoch
from torch_backend import PackedCollator, enable_packing, explain, make_train_step, patch

SHAPES = {
    "qwen2": ("Qwen2-0.5B", lambda layers: qwen2(False)),
    "experts": ("Qwen3-30B-A3B", lambda layers: qwen3_experts(layers, 8 if TOY else 128)),
}
LEARNING_RATE = 1e-5
WARM_UP = 6  # steps at least: layers are compiled, and the third or fourth is recorded as a CUDA graph
# What may cost DDP time: a search through the graph of every step, small messages.
VARIANTS: list[dict[str, Any]] = [
    {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 200},
    {"ddp_find_unused_parameters": False},
]


@dataclass(frozen=True)
class Contender:
    """The set-up of a contender: its number of ranks, what is sharded, and how rows are dealt to ranks.

    Attributes:
        gathered: of sharded layers, keep the weights between forward and backward.
        by_step: train by ``make_train_step`` in place of ``Trainer``.
        arguments: of transformers' ``TrainingArguments``, beyond those of all contenders.
    """

    ranks: int
    sharded: bool = False
    dealt: str = "as they come"
    gathered: bool = False
    by_step: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if self.ranks == 1:
            return "one"
        more = ["make_train_step"] * self.by_step + ["layers kept gathered"] * self.gathered
        more += [f"{name}={value}" for name, value in self.arguments.items()]
        return ", ".join([f"{self.ranks} ranks", "FSDP2" if self.sharded else "DDP", self.dealt, *more])


@dataclass
class Measured:
    """The results of a contender's processes."""

    tokens_per_second: float
    seconds_per_step: float
    peak: float
    imbalance: float
    losses: list[float] = field(default_factory=list)
    note: str = ""


def documents(capacity: int, count: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    median = 24 if TOY else 220
    lengths = np.clip(generator.lognormal(np.log(median), 1.3, count), 8, capacity).astype(int)
    return [generator.integers(1, 199 if TOY else 100_000, n) for n in lengths]


def dealt(lengths: list[int], capacity: int, contender: Contender, cost: Cost) -> tuple[PackPlan, float]:
    """Rows in the order that ranks take them in turn, whole steps only, and slowest rank over mean."""
    if contender.dealt == "equal cost":
        epoch = plan_epoch(lengths, capacity, seed=0, ranks=contender.ranks, cost=cost, equal_cost=True)
        rows = epoch.plan.select(epoch.steps.reshape(-1))
    else:
        rows = plan(lengths, capacity, seed=0)
        rows = rows.select(np.arange(rows.n_rows - rows.n_rows % contender.ranks))
    if contender.dealt == "balance":
        rows = rows.select(balance(rows, contender.ranks, cost=cost).steps.reshape(-1))
    loads = cost.of_rows(rows).reshape(-1, contender.ranks)
    return rows, float(loads.max(1).sum() / loads.mean(1).sum())


class Clock:
    """Takes the time after the warm-up and after the last epoch.

    Args:
        steps: of an epoch.
        epochs: that are timed.
    """

    def __init__(self, steps: int, epochs: int) -> None:
        self.steps, self.warm = steps, -(-WARM_UP // steps) * steps
        self.last = self.warm + epochs * steps
        self.ticks: list[float] = []

    def ended(self, step: int) -> None:
        """Call it after each step, counted from 1."""
        if step in (self.warm, self.last):
            synchronize()
            if dist.is_initialized():
                dist.barrier()
            self.ticks.append(time.perf_counter())


def train(contender: Contender, chosen: argparse.Namespace) -> Measured:
    """Run by every process of a contender."""
    from transformers import AutoModelForCausalLM

    config = SHAPES[chosen.shape][1](chosen.layers)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=DTYPE)
    docs = documents(chosen.capacity, chosen.documents)
    rows, imbalance = dealt([len(each) for each in docs], chosen.capacity, contender, Cost.from_config(config))
    steps = rows.n_rows // contender.ranks
    clock = Clock(steps, chosen.epochs)
    data = PackedDataset(docs, rows)
    if contender.by_step:
        losses, note = by_step(contender, model, data, clock, chosen.memory)
    else:
        losses, note = by_trainer(contender, model, data, clock, chosen.memory)
    seconds = clock.ticks[1] - clock.ticks[0]
    return Measured(
        tokens_per_second=rows.n_tokens * chosen.epochs / seconds,
        seconds_per_step=seconds / (steps * chosen.epochs),
        peak=highest_gib(),
        imbalance=imbalance,
        losses=losses,
        note=note,
    )


def by_trainer(
    contender: Contender, model: Any, data: PackedDataset, clock: Clock, memory: Any
) -> tuple[list[float], str]:
    """Trains by ``Trainer``; the losses, and how its steps ran."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.ended(state.global_step)

    if contender.sharded:
        model.cpu()  # accelerate shards what it finds on the host
    wrap = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        "reshard_after_forward": not contender.gathered,
    }
    sharding = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap} if contender.sharded else {}
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=clock.last, per_device_train_batch_size=1, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", optim="adamw_torch_fused", logging_steps=clock.steps, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=TOY, train_sampling_strategy="sequential",
            remove_unused_columns=False, **sharding, **contender.arguments,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Ticks()])
        enable_packing(trainer, verify=False, memory=memory)
        trainer.train()
    if contender.sharded and not TOY:  # accelerate shards nothing on the CPU
        assert any(isinstance(p, DTensor) for p in trainer.model.parameters()), "the weights are not sharded"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, "; ".join(note for note in explain(trainer).notes if "of the step" in note)


def by_step(
    contender: Contender, model: Any, data: PackedDataset, clock: Clock, memory: Any
) -> tuple[list[float], str]:
    """Trains by ``make_train_step`` with what ``Trainer`` has by default; the last loss, and how the steps ran."""
    patch(model.train(), verify=False)
    collate, wrapped, rank = PackedCollator(model), model, int(os.environ["RANK"])
    if contender.ranks > 1:
        dist.init_process_group("gloo" if TOY else "nccl")
    if contender.sharded:
        mesh = init_device_mesh(DEVICE.type, (contender.ranks,))
        for module in (*model.get_decoder().layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=not contender.gathered)
    elif contender.ranks > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    fused = not TOY
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=fused)
    step = make_train_step(wrapped, optimizer, max_grad_norm=1.0, memory=memory)
    for number in range(clock.last):
        row = number % clock.steps * contender.ranks + rank
        metrics = step(collate([data[row]]))
        clock.ended(number + 1)
    return [float(metrics["loss"])], "; ".join(f"{part} of the step: {how}" for part, how in step.parts.items())


def launched(contender: Contender, chosen: argparse.Namespace) -> list[Result]:
    """Start the processes of a contender; what rank 0 found, or why it failed."""
    arguments = [
        "--capacity", str(chosen.capacity), "--epochs", str(chosen.epochs), "--documents", str(chosen.documents),
        "--shape", chosen.shape, "--layers", str(chosen.layers), "--memory", chosen.memory,
    ]  # fmt: skip
    limit = min(chosen.limit, seconds_left())
    found = launch("benchmarks.gpu_ranks", contender.ranks, asdict(contender), arguments, limit)
    section = f"training on several ranks, {'toy' if TOY else SHAPES[chosen.shape][0]}"
    case = f"rows of {chosen.capacity:,}, heavy-tailed"
    if isinstance(found, str):
        return [Result(section, case, contender.name, None, "real tokens/s", found)]
    measured = Measured(**found)
    figures = {
        "real tokens/s": measured.tokens_per_second,
        "ms per step": measured.seconds_per_step * 1e3,
        "slowest rank over mean, by cost": measured.imbalance,
        "GiB at most, rank 0": measured.peak,
        "last loss": measured.losses[-1],
    }
    return [Result(section, case, contender.name, value, unit, measured.note) for unit, value in figures.items()]


def contenders(ranks: int, shape: str) -> list[Contender]:
    """The most important first."""
    if shape == "experts":  # which one GPU does not hold
        return [Contender(ranks, True, "balance", gathered, by_step=True) for gathered in (False, True)]
    orders = ("balance", "equal cost", "as they come")
    several = [Contender(ranks, sharded, order) for order in orders for sharded in (False, True)]
    more = [Contender(ranks, sharded, "balance", by_step=True) for sharded in (False, True)]
    more += [Contender(ranks, dealt="balance", arguments=each) for each in VARIANTS]
    return [Contender(1), *several, Contender(ranks, sharded=True, dealt="balance", gathered=True), *more]


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    add_options(options)
    options.add_argument("--capacity", type=int, default=256 if TOY else 16_384, help="tokens of a row")
    options.add_argument("--shape", choices=SHAPES, default="qwen2")
    options.add_argument("--layers", type=int, default=2 if TOY else 48, help="of --shape experts")
    options.add_argument("--memory", default="none", help="level of memory")
    options.add_argument("--epochs", type=int, default=1 if TOY else 3, help="timed, after the warm-up")
    options.add_argument("--documents", type=int, default=60 if TOY else 2_400)
    options.add_argument("--limit", type=float, default=240, help="seconds for a contender")
    chosen = parsed(options, arguments)
    if trained(chosen, lambda contender: train(Contender(**contender), chosen)):
        return []
    found = compared(contenders(chosen.ranks, chosen.shape), lambda contender: launched(contender, chosen))
    return collected(found, chosen.output, "ranks")


if __name__ == "__main__":
    main()
