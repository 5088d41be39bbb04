"""Trainer with enable_packing, and make_train_step, on several GPUs against one: DDP and FSDP2, rows by cost or not.

    python -m benchmarks.gpu_ranks                      # 2 GPUs, Qwen2-0.5B shape, rows of 16,384, bfloat16
    python -m benchmarks.gpu_ranks --ranks 8 --match FSDP2 --output results
    python -m benchmarks.gpu_ranks --documents 1200 --epochs 2 --limit 60 --budget 140   # what fits into three minutes
    python -m benchmarks.gpu_ranks --ranks 8 --shape experts --match FSDP2 --memory full    # Qwen3-30B-A3B
    python -m benchmarks.gpu_ranks --shape qwen2.5-7b --lengths agents --documents 750 --every 13 --capacity 65536 \
        --memory full --warm-up 4 --epochs 1            # beside SFTTrainer, padded and packed by TRL
    python -m benchmarks.gpu_ranks --tiny               # two processes on the CPU by gloo, where nothing is sharded

Every contender trains random weights on the same documents, one row per rank and step, in processes of its own that
torchrun starts, by ``Trainer`` and ``enable_packing`` unless its name says ``make_train_step``. Documents are heavy-
tailed: a lognormal with sigma 1.3, at most as long as a row, so rows of few long documents cost several times as much
attention as rows of many short ones. ``balance`` puts rows of about equal cost into one step, ``equal cost`` makes the
rows for their step, as ``enable_packing(equal_cost=True)`` does, and ``as they come`` leaves the plan's random order.
The first 6 steps warm up, and the next epochs are timed as a whole, on rank 0 after all ranks have ended. Tokens per
second count real tokens of all ranks; the ratio is to one GPU on the rows as they come.
``--shape experts`` is that of Qwen3-30B-A3B, trained whole by ``make_train_step`` with all its layers sharded, or with
``--layers`` of them. The dense shapes of 7 and 12 billion weights run by ``Trainer`` and, stock, by TRL's SFTTrainer,
layers sharded by FSDP2, or by ZeRO-3, which keeps float32 weights too, and recomputed. ``--shape llama`` and ``bamba``
with ``--ranks 1`` keep everything; stock Bamba scans in plain torch where mamba-ssm is not installed. ``--every N``
trains a sample, every Nth of the documents in order of length; the time of an epoch of all documents is computed from
the tokens per second of the sample.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.clock import DEVICE, TOY, StepClock, header, highest_gib
from benchmarks.harness import NOTE, Figures, parsed, parser
from benchmarks.launch import add_options, compared, trained
from benchmarks.report import Result, collected
from benchmarks.shapes import config
from benchmarks.workload import LEARNING_RATE, RATE, random_model, tokenizer, trainer_options
from packing_core import Cost, PackedDataset, PackPlan, balance, plan
from packing_core.planning.epochs import plan_epoch
from torch_backend import PackedCollator, enable_packing, explain, make_train_step, patch

# name -> shape, layers
SHAPES = {
    "qwen2": ("Qwen2-0.5B", 24),
    "experts": ("Qwen3-30B-A3B", 48),
    "qwen2.5-7b": ("Qwen2.5-7B", 28),
    "llama": ("Llama-3-8B", 8),
    "bamba": ("Bamba-9B", 11),
    "nemo": ("Mistral-Nemo-12B", 40),
}
# name -> share of the documents, median of their lengths, sigma of the logarithm
LENGTHS = {
    "heavy": [(1.0, 220, 1.3)],
    "agents": [(0.8, 1_300, 0.8), (0.2, 9_000, 1.0)],  # a mean of 4,000
    "chats": [(1.0, 181, 0.75)],  # a mean of 240
}
ZERO3 = {
    "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    | {f"train_{name}": "auto" for name in ("batch_size", "micro_batch_size_per_gpu")},
    "bf16": not TOY,
}


@dataclass(frozen=True)
class Contender:
    """The set-up of a contender: its number of ranks, what is sharded, and how rows are dealt to ranks.

    Attributes:
        by_step: train by ``make_train_step`` in place of ``Trainer``.
        zero3: sharded by DeepSpeed.
        stock: documents of a padded batch of ``SFTTrainer`` alone, 0 if TRL packs them; None for ours.
    """

    ranks: int
    sharded: bool = False
    dealt: str = "as they come"
    by_step: bool = False
    zero3: bool = False
    stock: int | None = None

    @property
    def name(self) -> str:
        if self == Contender(1):
            return "one"
        strategy = "ZeRO-3" if self.zero3 else "FSDP2" if self.sharded else "DDP"
        more = ["make_train_step"] * self.by_step
        if self.stock is not None:
            more = ["SFTTrainer", f"padded, batches of {self.stock}" if self.stock else "packed by TRL"]
        dealt = [self.dealt] * (self.stock is None)
        return ", ".join([*(["one"] if self.ranks == 1 else [f"{self.ranks} ranks", strategy]), *dealt, *more])


def lengths_of(chosen: argparse.Namespace) -> np.ndarray[Any, Any]:
    """The lengths of all documents, in ascending order."""
    generator = np.random.default_rng(0)
    share, median, sigma = map(np.array, zip(*LENGTHS[chosen.lengths]))
    kind = generator.choice(len(share), chosen.documents, p=share)
    lengths = generator.lognormal(np.log(median[kind] * (0.1 if TOY else 1)), sigma[kind])
    return np.sort(np.clip(lengths, 8, chosen.capacity).astype(int))


def sampled(lengths: np.ndarray[Any, Any], every: int) -> list[np.ndarray[Any, Any]]:
    """Every Nth document, in random order."""
    generator = np.random.default_rng(1)
    sample = generator.permutation(lengths[every // 2 :: every])
    return [generator.integers(1, 199 if TOY else 100_000, n) for n in sample]


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


def train(contender: Contender, chosen: argparse.Namespace) -> Figures:
    """Run by every process of a contender."""
    name, layers = SHAPES[chosen.shape]
    model = random_model(
        config(name, layers=chosen.layers or layers), "sdpa" if contender.stock is None else chosen.stock_attention
    )
    lengths = lengths_of(chosen)
    docs = sampled(lengths, chosen.every)
    rows, imbalance = dealt([len(ids) for ids in docs], chosen.capacity, contender, Cost.from_config(model.config))
    train_all = by_step if contender.by_step else by_trainer
    clock, tokens, loss, note = train_all(contender, model, PackedDataset(docs, rows), chosen)
    rate = clock.in_timed(tokens) / clock.seconds
    return {
        RATE: rate,
        "ms per step": clock.ms,
        "tokens/s for each GPU": rate / contender.ranks,
        "s for an epoch of all documents": float(lengths.sum()) / rate,
        **({"slowest rank over mean, by cost": imbalance} if contender.stock is None else {}),
        "GiB at most, rank 0": clock.peak,
        "last loss": loss,
        NOTE: note,
    }


def clock_of(chosen: argparse.Namespace, tokens: Sequence[int], together: int) -> tuple[StepClock, list[int]]:
    """The clock of the chosen steps, and the real tokens of each step of an epoch.

    Args:
        tokens: of each row or batch of an epoch.
        together: of them in a step.
    """
    steps = [sum(tokens[at : at + together]) for at in range(0, len(tokens), together)]
    timed = chosen.epochs * len(steps)
    peak = highest_gib()
    clock = StepClock(chosen.warm_up, min(timed, chosen.steps or timed))
    clock.peak = peak  # of the process: what making and sharding the model took counts too
    return clock, steps


def by_trainer(
    contender: Contender, model: Any, data: PackedDataset, chosen: argparse.Namespace
) -> tuple[StepClock, list[int], float, str]:
    """Trains by ``Trainer``; its clock, the tokens of steps, the last loss, and how its steps ran."""
    stock = contender.stock is not None
    wrap = {
        "version": 2,
        "transformer_layer_cls_to_wrap": [type(model.get_decoder().layers[0]).__name__],
        "activation_checkpointing": stock,
    }
    sharding = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap} if contender.sharded else {}
    if contender.sharded:
        model.cpu()  # accelerate shards what it finds on the host
    with TemporaryDirectory() as folder:
        options = trainer_options(
            1, output_dir=folder, per_device_train_batch_size=contender.stock or 1, remove_unused_columns=False,
            train_sampling_strategy="sequential", **sharding, **(ZERO3 if contender.zero3 else {}),
        )  # fmt: skip
        if stock:
            trainer, tokens = stock_trainer(contender, model, data, options)
        else:
            trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), train_dataset=data)
            enable_packing(trainer, verify=False, memory=chosen.memory)
            tokens = data.plan.row_tokens.tolist()
        clock, tokens = clock_of(chosen, tokens, contender.ranks * (contender.stock or 1))
        trainer.args.max_steps, trainer.args.logging_steps = clock.last, min(len(tokens), clock.last)
        trainer.add_callback(clock.callback())
        trainer.train()
    if contender.sharded and not TOY:  # accelerate shards nothing on the CPU
        assert any(isinstance(p, DTensor) for p in trainer.model.parameters()), "the weights are not sharded"
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    how = chosen.stock_attention if stock else "; ".join(n for n in explain(trainer).notes if "of the step" in n)
    return clock, tokens, loss, how


def stock_trainer(
    contender: Contender, model: Any, data: PackedDataset, options: dict[str, Any]
) -> tuple[Any, list[int]]:
    """TRL's trainer, and the tokens of each document or row that it batches."""
    import datasets
    import trl

    documents = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in data.sequences]})
    options = {"bf16": False, "gradient_checkpointing": "deepspeed" in options} | options
    arguments = trl.SFTConfig(**options, packing=not contender.stock, max_length=data.plan.capacity)
    trainer: Any = trl.SFTTrainer(model, arguments, train_dataset=documents, processing_class=tokenizer())
    return trainer, [len(ids) for ids in trainer.train_dataset["input_ids"]]


def by_step(
    contender: Contender, model: Any, data: PackedDataset, chosen: argparse.Namespace
) -> tuple[StepClock, list[int], float, str]:
    """Trains by ``make_train_step`` with what ``Trainer`` has by default; as :func:`by_trainer`."""
    patch(model.train(), verify=False)
    collate, wrapped, rank = PackedCollator(model), model, int(os.environ["RANK"])
    if contender.ranks > 1:
        dist.init_process_group("gloo" if TOY else "nccl")
    if contender.sharded:
        mesh = init_device_mesh(DEVICE.type, (contender.ranks,))
        for module in (*model.get_decoder().layers, model):
            fully_shard(module, mesh=mesh)
    elif contender.ranks > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    fused = not TOY
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=fused)
    step = make_train_step(wrapped, optimizer, max_grad_norm=1.0, memory=chosen.memory)
    clock, tokens = clock_of(chosen, data.plan.row_tokens.tolist(), contender.ranks)
    rows = (number % len(tokens) * contender.ranks + rank for number in range(clock.last))
    metrics = clock.loop(step, (collate([data[row]]) for row in rows))
    how = "; ".join(f"{part} of the step: {how}" for part, how in step.parts.items())
    return clock, tokens, float(metrics["loss"]), how


def contenders(ranks: int, shape: str) -> list[Contender]:
    """The most important first."""
    if shape == "experts":  # which one GPU does not hold
        return [Contender(ranks, True, "balance", by_step=True)]
    if shape != "qwen2":
        strategies: list[dict[str, Any]] = [{"sharded": True}, {"zero3": True}] if ranks > 1 else [{}]
        dealt = {"dealt": "equal cost"} if ranks > 1 else {}
        kinds: list[dict[str, Any]] = [dealt, *({"stock": padded} for padded in (0, 1, 2))]
        return [Contender(ranks, **strategy, **kind) for strategy in strategies for kind in kinds]
    orders = ("balance", "equal cost", "as they come")
    several = [Contender(ranks, sharded, order) for order in orders for sharded in (False, True)]
    more = [Contender(ranks, sharded, "balance", by_step=True) for sharded in (False, True)]
    return [Contender(1), *several, *more]


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    add_options(options, limit=240)
    options.add_argument("--capacity", type=int, default=256 if TOY else 16_384, help="tokens of a row")
    options.add_argument("--shape", choices=SHAPES, default="qwen2")
    options.add_argument("--layers", type=int, default=0, help="of --shape, if not all")
    options.add_argument("--memory", default="none", help="level of memory")
    options.add_argument("--epochs", type=int, default=1 if TOY else 3, help="timed, after the warm-up")
    options.add_argument("--warm-up", type=int, default=6, help="steps: layers are compiled, the fourth is recorded")
    options.add_argument("--steps", type=int, default=0, help="timed at most, if not whole epochs")
    options.add_argument("--documents", type=int, default=60 if TOY else 2_400)
    options.add_argument("--lengths", choices=LENGTHS, default="heavy", help="of documents")
    options.add_argument("--every", type=int, default=1, help="trains a sample of the documents")
    options.add_argument("--stock-attention", default="sdpa", help="of SFTTrainer alone")
    chosen = parsed(options, arguments)
    if trained(chosen, lambda contender: train(Contender(**contender), chosen)):
        return []
    section = f"training on several ranks, {'toy' if TOY else SHAPES[chosen.shape][0]}"
    case, racing = f"rows of {chosen.capacity:,}, {chosen.lengths}", contenders(chosen.ranks, chosen.shape)
    results = compared("benchmarks.gpu_ranks", section, case, racing, chosen)
    return collected(results, header(), chosen.output, "ranks")


if __name__ == "__main__":
    main()
