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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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

from benchmarks._launch import add_options, compared, launch, trained
from benchmarks.gpu import collected, parsed, parser
from benchmarks.gpu_clock import DEVICE, TOY, Result, highest_gib, seconds_left, synchronize
from benchmarks.gpu_moe_shapes import qwen3 as qwen3_experts
from benchmarks.gpu_trainer_runs import tokenizer
from benchmarks.gpu_workload import DTYPE, qwen2
from packing_core import Cost, PackedDataset, PackPlan, balance, plan
from packing_core.planning.epochs import plan_epoch
from torch_backend import PackedCollator, enable_packing, explain, make_train_step, patch


def dense(
    config: str, width: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> Callable[[int], Any]:
    """Number of layers -> the config of a decoder whose heads have 128 columns, a toy without a GPU."""
    if TOY:
        width, inner, heads, kv_heads, vocabulary = 64, 96, 4, 2, 199
    return lambda layers: getattr(transformers, config)(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=16 if TOY else 128, vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=False,
        max_position_embeddings=131_072, sliding_window=None, **more,
    )  # fmt: skip


# name -> name in tables, layers, number of layers -> config
SHAPES: dict[str, tuple[str, int, Callable[[int], Any]]] = {
    "qwen2": ("Qwen2-0.5B", 24, lambda layers: qwen2(False)),
    "experts": ("Qwen3-30B-A3B", 48, lambda layers: qwen3_experts(layers, 8 if TOY else 128)),
    "qwen2.5-7b": ("Qwen2.5-7B", 28, dense("Qwen2Config", 3_584, 18_944, 28, 4, 152_064)),
    "llama": ("Llama-3-8B, 8 layers", 8, dense("LlamaConfig", 4_096, 14_336, 32, 8, 128_256)),
    "bamba": (
        "Bamba-9B, 11 layers",
        11,
        dense(
            "BambaConfig",
            4_096,
            14_336,
            32,
            8,
            128_000,
            attn_layer_indices=[1 if TOY else 9],
            mamba_n_heads=2 if TOY else 128,
        ),
    ),
    "nemo": ("Mistral-Nemo-12B", 40, dense("MistralConfig", 5_120, 14_336, 32, 8, 131_072)),
}
# name -> share of the documents, median of their lengths, sigma of the logarithm
LENGTHS = {
    "heavy": [(1.0, 220, 1.3)],
    "agents": [(0.8, 1_300, 0.8), (0.2, 9_000, 1.0)],  # a mean of 4,000
    "chats": [(1.0, 181, 0.75)],  # a mean of 240
}
LEARNING_RATE = 1e-5
ZERO3 = {
    "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    | {f"train_{name}": "auto" for name in ("batch_size", "micro_batch_size_per_gpu")},
    "bf16": not TOY,
}
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
        stock: documents of a padded batch of ``SFTTrainer`` alone, 0 if TRL packs them; None for ours.
    """

    ranks: int
    sharded: bool = False
    dealt: str = "as they come"
    gathered: bool = False
    by_step: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    stock: int | None = None

    @property
    def name(self) -> str:
        if self == Contender(1):
            return "one"
        strategy = "ZeRO-3" if "deepspeed" in self.arguments else "FSDP2" if self.sharded else "DDP"
        more = ["make_train_step"] * self.by_step + ["layers kept gathered"] * self.gathered
        more += [f"{name}={value}" for name, value in self.arguments.items() if strategy != "ZeRO-3"]
        if self.stock is not None:
            more = ["SFTTrainer", f"padded, batches of {self.stock}" if self.stock else "packed by TRL"]
        dealt = [self.dealt] * (self.stock is None)
        return ", ".join([*(["one"] if self.ranks == 1 else [f"{self.ranks} ranks", strategy]), *dealt, *more])


@dataclass
class Measured:
    """The results of a contender's processes."""

    tokens_per_second: float
    seconds_per_step: float
    peak: float
    imbalance: float | None
    epoch: float
    losses: list[float] = field(default_factory=list)
    note: str = ""


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


class Clock:
    """Takes the time after the warm-up and after the last step.

    Args:
        chosen: the options.
        tokens: of each row or batch of an epoch.
        together: of them in a step.
    """

    def __init__(self, chosen: argparse.Namespace, tokens: Sequence[int], together: int) -> None:
        self.tokens = [sum(tokens[at : at + together]) for at in range(0, len(tokens), together)]
        self.steps, self.warm = len(self.tokens), chosen.warm_up
        self.last = self.warm + min(chosen.epochs * self.steps, chosen.steps or chosen.epochs * self.steps)
        self.ticks: list[float] = []

    def ended(self, step: int) -> None:
        """Call it after each step, counted from 1."""
        if step in (self.warm, self.last):
            synchronize()
            if dist.is_initialized():
                dist.barrier()
            self.ticks.append(time.perf_counter())

    @property
    def timed(self) -> list[int]:
        """The real tokens of each step between the two times."""
        return [self.tokens[step % self.steps] for step in range(self.warm, self.last)]


def train(contender: Contender, chosen: argparse.Namespace) -> Measured:
    """Run by every process of a contender."""
    config = SHAPES[chosen.shape][2](chosen.layers or (2 if TOY else SHAPES[chosen.shape][1]))
    torch.manual_seed(0)
    attention = "sdpa" if contender.stock is None else chosen.stock_attention
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=DTYPE)
    lengths = lengths_of(chosen)
    docs = sampled(lengths, chosen.every)
    rows, imbalance = dealt([len(each) for each in docs], chosen.capacity, contender, Cost.from_config(config))
    train_all = by_step if contender.by_step else by_trainer
    clock, losses, note = train_all(contender, model, PackedDataset(docs, rows), chosen)
    seconds = clock.ticks[1] - clock.ticks[0]
    return Measured(
        tokens_per_second=sum(clock.timed) / seconds,
        seconds_per_step=seconds / len(clock.timed),
        peak=highest_gib(),
        imbalance=imbalance if contender.stock is None else None,
        epoch=float(lengths.sum()) / sum(clock.timed) * seconds,
        losses=losses,
        note=note,
    )


def by_trainer(
    contender: Contender, model: Any, data: PackedDataset, chosen: argparse.Namespace
) -> tuple[Clock, list[float], str]:
    """Trains by ``Trainer``; the losses, and how its steps ran."""

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.ended(state.global_step)

    stock = contender.stock is not None
    wrap = {
        "version": 2,
        "transformer_layer_cls_to_wrap": [type(model.get_decoder().layers[0]).__name__],
        "reshard_after_forward": not contender.gathered,
        "activation_checkpointing": stock,
    }
    sharding = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap} if contender.sharded else {}
    if contender.sharded:
        model.cpu()  # accelerate shards what it finds on the host
    with TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "per_device_train_batch_size": contender.stock or 1, "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "report_to": [], "save_strategy": "no",
            "disable_tqdm": True, "use_cpu": TOY, "train_sampling_strategy": "sequential",
            "remove_unused_columns": False, **sharding, **contender.arguments,
        }  # fmt: skip
        if stock:
            trainer, tokens = stock_trainer(contender, model, data, options)
        else:
            trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), train_dataset=data)
            enable_packing(trainer, verify=False, memory=chosen.memory)
            tokens = data.plan.row_tokens.tolist()
        clock = Clock(chosen, tokens, contender.ranks * (contender.stock or 1))
        trainer.args.max_steps, trainer.args.logging_steps = clock.last, min(clock.steps, clock.last)
        trainer.add_callback(Ticks())
        trainer.train()
    if contender.sharded and not TOY:  # accelerate shards nothing on the CPU
        assert any(isinstance(p, DTensor) for p in trainer.model.parameters()), "the weights are not sharded"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    how = chosen.stock_attention if stock else "; ".join(n for n in explain(trainer).notes if "of the step" in n)
    return clock, losses, how


def stock_trainer(
    contender: Contender, model: Any, data: PackedDataset, options: dict[str, Any]
) -> tuple[Any, list[int]]:
    """TRL's trainer, and the tokens of each document or row that it batches."""
    import datasets
    import trl

    documents = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in data.sequences]})
    options = {"bf16": False, "gradient_checkpointing": "deepspeed" in options} | options
    arguments = trl.SFTConfig(**options, packing=not contender.stock, max_length=data.plan.capacity)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=documents, processing_class=tokenizer())
    return trainer, [len(ids) for ids in trainer.train_dataset["input_ids"]]


def by_step(
    contender: Contender, model: Any, data: PackedDataset, chosen: argparse.Namespace
) -> tuple[Clock, list[float], str]:
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
    step = make_train_step(wrapped, optimizer, max_grad_norm=1.0, memory=chosen.memory)
    clock = Clock(chosen, data.plan.row_tokens.tolist(), contender.ranks)
    for number in range(clock.last):
        row = number % clock.steps * contender.ranks + rank
        metrics = step(collate([data[row]]))
        clock.ended(number + 1)
    return clock, [float(metrics["loss"])], "; ".join(f"{part} of the step: {how}" for part, how in step.parts.items())


def launched(contender: Contender, chosen: argparse.Namespace) -> list[Result]:
    """Start the processes of a contender; what rank 0 found, or why it failed."""
    names = ["capacity", "shape", "layers", "memory", "epochs", "warm_up", "steps", "documents", "lengths", "every"]
    arguments = [f"--{n.replace('_', '-')}={getattr(chosen, n)}" for n in [*names, "stock_attention"]]
    limit = min(chosen.limit, seconds_left())
    found = launch("benchmarks.gpu_ranks", contender.ranks, asdict(contender), arguments, limit)
    section = f"training on several ranks, {'toy' if TOY else SHAPES[chosen.shape][0]}"
    case = f"rows of {chosen.capacity:,}, {chosen.lengths}"
    if isinstance(found, str):
        return [Result(section, case, contender.name, None, "real tokens/s", found)]
    measured = Measured(**found)
    figures = {
        "real tokens/s": measured.tokens_per_second,
        "ms per step": measured.seconds_per_step * 1e3,
        "tokens/s for each GPU": measured.tokens_per_second / contender.ranks,
        "s for an epoch of all documents": measured.epoch,
        "slowest rank over mean, by cost": measured.imbalance,
        "GiB at most, rank 0": measured.peak,
        "last loss": measured.losses[-1],
    }
    return [
        Result(section, case, contender.name, value, unit, measured.note)
        for unit, value in figures.items()
        if value is not None
    ]


def contenders(ranks: int, shape: str) -> list[Contender]:
    """The most important first."""
    if shape == "experts":  # which one GPU does not hold
        return [Contender(ranks, True, "balance", gathered, by_step=True) for gathered in (False, True)]
    if shape != "qwen2":
        strategies: list[dict[str, Any]] = [{"sharded": True}, {"arguments": ZERO3}] if ranks > 1 else [{}]
        dealt = {"dealt": "equal cost"} if ranks > 1 else {}
        kinds = [dealt, *({"stock": padded} for padded in (0, 1, 2))]
        return [Contender(ranks, **strategy, **kind) for strategy in strategies for kind in kinds]
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
    options.add_argument("--layers", type=int, default=0, help="of --shape, if not all")
    options.add_argument("--memory", default="none", help="level of memory")
    options.add_argument("--epochs", type=int, default=1 if TOY else 3, help="timed, after the warm-up")
    options.add_argument("--warm-up", type=int, default=6, help="steps: layers are compiled, the fourth is recorded")
    options.add_argument("--steps", type=int, default=0, help="timed at most, if not whole epochs")
    options.add_argument("--documents", type=int, default=60 if TOY else 2_400)
    options.add_argument("--lengths", choices=LENGTHS, default="heavy", help="of documents")
    options.add_argument("--every", type=int, default=1, help="trains a sample of the documents")
    options.add_argument("--stock-attention", default="sdpa", help="of SFTTrainer alone")
    options.add_argument("--limit", type=float, default=240, help="seconds for a contender")
    chosen = parsed(options, arguments)
    if trained(chosen, lambda contender: train(Contender(**contender), chosen)):
        return []
    found = compared(contenders(chosen.ranks, chosen.shape), lambda contender: launched(contender, chosen))
    return collected(found, chosen.output, "ranks")


if __name__ == "__main__":
    main()
