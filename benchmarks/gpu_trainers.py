"""Training by the lines that people write: trainers as they are and after ``enable_packing``, ``crosspack train``.

    python -m benchmarks.gpu_trainers                       # "trainers": every contender, rows of 16,384, bfloat16
    python -m benchmarks.gpu_trainers --capacity 65536 --match make_train_step
    python -m benchmarks.gpu_trainers --repeat 10 --epochs 1  # 70 steps an epoch and not 7
    python -m benchmarks.gpu_trainers --only sft lora --output results  # results/sft.json, results/lora.json
    python -m benchmarks.gpu_trainers --only train          # each contender in processes of its own
    python -m benchmarks.gpu_trainers --only trainers sft lora train --tiny  # on the CPU, to see it run

Sections, each of one to four minutes:

    trainers    every contender on the Qwen2-0.5B shape, random weights, bfloat16, fused AdamW
    sft         SFTTrainer after enable_packing at rows of 16,384 and 65,536, packed by TRL and by Crosspack, beside the
                best stock step
    memory      SFTTrainer after enable_packing at every level of memory, and with gradient checkpointing without the
                fast step, rows of 16,384
    lora        Trainer with LoRA adapters on the Llama-3-8B shape, rows of 8,192, beside the best stock step
    train       crosspack train on the Qwen2-0.5B shape, float32 weights under autocast and bfloat16 weights

Contenders of "trainers", "sft" and "lora" train on the same packed rows, one row a step: 480 documents of mean 243 and
at most 2,048 tokens, in the fewest rows, evened out so that the rows are full. The first epochs warm up (they compile,
find the shapes and record), the next ones are timed as a whole. Tokens per second count real tokens. Memory is the most
that was allocated over the whole run, and over the timed epochs alone. Losses are printed so that contenders can be
compared; that they are exact is tested elsewhere (``benchmarks.gpu --only step``, ``tests/torch_backend``). The best
stock step is that of ``benchmarks.gpu_step``, by hand and on the same documents.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.clock import TOY, StepClock, header
from benchmarks.gpu_step import BEST_STOCK, Contender, race, stock, stock_liger
from benchmarks.harness import NOTE, Figures, in_turn, measured, parsed, parser
from benchmarks.report import Result, collected
from benchmarks.shapes import config
from benchmarks.workload import (
    LEARNING_RATE,
    RATE,
    Shape,
    documents,
    make_model,
    tight,
    tokenizer,
    trainer_options,
    with_adapters,
)
from packing_core import PackedDataset
from torch_backend import PackedCollator, enable_packing, explain, make_train_step, patch
from torch_backend.steps.memory import LEVELS

WARM_UP = 14  # steps at least, in two or more whole epochs


@dataclass
class Run:
    """The data of a contender, and its clock.

    Attributes:
        rows: one a step.
        epochs: timed.
        losses: the first and the last one, which trainers average over an epoch.
    """

    documents: Sequence[Any]
    rows: PackedDataset
    epochs: int
    losses: list[float] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        self.set_rows(len(self.rows))

    def set_rows(self, count: int) -> None:
        """Sets the rows of an epoch, where a trainer makes rows of its own."""
        self.row_count = count
        self.clock = StepClock(max(2, -(-WARM_UP // count)) * count, self.epochs * count)


# -- the contenders ----------------------------------------------------------------------------------------------------


def trainer(run: Run, model: Any, *, packed: bool = True, memory: Any = None) -> None:
    """Stock: rows with restarting positions, which transformers turns into a mask that keeps documents apart."""
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **_options(run, "sequential"), remove_unused_columns=False)
        rows: Any = run.rows if packed else StockRows(run.rows)
        hf_trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[run.clock.callback()])
        if packed:
            enable_packing(hf_trainer, verify=False, memory=memory)
        _train(run, hf_trainer, packed)


def train_step(run: Run, model: Any) -> None:
    patch(model, verify=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = make_train_step(model, optimizer, max_grad_norm=1.0)
    rows: Any = run.rows
    loader = DataLoader(rows, batch_size=1, collate_fn=PackedCollator(model), pin_memory=not TOY)

    def recorded(batch: Any) -> Any:
        metrics = step(batch)
        if not run.losses:  # after the first step the clock waits too
            run.losses.append(float(metrics["loss"]))
        return metrics

    run.losses.append(float(run.clock.loop(recorded, chain.from_iterable(repeat(loader)))["loss"]))
    run.note = "; ".join(f"{part}: {what}" for part, what in step.parts.items())


def sft(
    run: Run,
    model: Any,
    *,
    packed: bool = True,
    fast: bool = True,
    checkpointing: bool = False,
    packing: bool = True,
    memory: Any = None,
) -> None:
    """TRL packs the documents in rows of the same length, or leaves it to Crosspack; checkpointing is its default."""
    import datasets
    import trl

    data = datasets.Dataset.from_dict({"input_ids": [document.tolist() for document in run.documents]})
    with TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            folder, **_options(run, "sequential" if packing else "random"), packing=packing,
            max_length=run.rows.plan.capacity, bf16=not TOY, gradient_checkpointing=checkpointing,
        )  # fmt: skip
        sft_trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer())
        if packed:
            enable_packing(sft_trainer, verify=False, fast=fast, memory=memory)
        run.set_rows(len(sft_trainer.get_train_dataloader()))
        sft_trainer.add_callback(run.clock.callback())
        arguments.max_steps, arguments.logging_steps = run.clock.last, run.row_count
        _train(run, sft_trainer, packed)


TRAINER, SFT = "Trainer, enable_packing", "SFTTrainer(packing=True), enable_packing"
SFT_FULL = "SFTTrainer(packing=False), enable_packing"
CONTENDERS: dict[str, Callable[[Run, Any], None]] = {
    "make_train_step": train_step,
    TRAINER: trainer,
    SFT: sft,
    SFT_FULL: partial(sft, packing=False),
    f"{SFT}, checkpointing": partial(sft, checkpointing=True),
    **{f'{SFT}(memory="{level}")': partial(sft, memory=level) for level in LEVELS},
    f"{SFT}(fast=False)": partial(sft, fast=False),
    f"{SFT}(fast=False), checkpointing": partial(sft, fast=False, checkpointing=True),
    "SFTTrainer(packing=True), stock SDPA": partial(sft, packed=False),
    "Trainer, stock SDPA": partial(trainer, packed=False),
}


class StockRows(Dataset[Any]):
    """The same rows as a stock model takes them: without padding, positions that restart, no target at a start."""

    def __init__(self, rows: PackedDataset) -> None:
        self.rows, self.collate = rows, PackedCollator(padding_free=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = self.collate(self.rows[index])
        return {name: batch[name][0] for name in ("input_ids", "labels", "position_ids")}


def _options(run: Run, order: str) -> dict[str, Any]:
    rows = {"per_device_train_batch_size": 1, "train_sampling_strategy": order, "logging_steps": run.row_count}
    return trainer_options(run.clock.last, **rows)


def _train(run: Run, trainer: Any, packed: bool) -> None:
    trainer.train()
    run.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if packed and hasattr(trainer, "packed_step"):
        run.note = "; ".join(note for note in explain(trainer).notes if "of the step" in note)
    trainer.accelerator.free_memory()


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(
    shape: Shape, name: str, capacity: int, epochs: int, repeat: int, contenders: Mapping[str, Any] = CONTENDERS
) -> Iterator[Result]:
    """The figures of one contender; ``repeat``: of the documents, for epochs of more steps."""

    def figures() -> Figures:
        docs = documents() * repeat
        run = Run(docs, PackedDataset(docs, tight(docs, capacity)), epochs)
        model = make_model(replace(shape, lora=False), None, few=TOY)
        if shape.lora:
            model = (shape.adapters or with_adapters)(model)
        contenders[name](run, model)
        clock = run.clock
        return {
            RATE: sum(map(len, docs)) * epochs / clock.seconds,
            "ms per step": clock.ms,
            "GiB at most, whole run": clock.peak,
            "GiB at most, after the warm-up": clock.timed_peak,
            "first step, s": clock.first,
            "warm-up, s": clock.before,
            "first loss": run.losses[0],
            "last loss": run.losses[-1],
            NOTE: run.note,
        }

    yield from measured(f"training, {shape.name}", f"rows of {capacity:,}", name, RATE, figures)


# -- the sections ------------------------------------------------------------------------------------------------------

SMALL = Shape("toy" if TOY else "Qwen2-0.5B", partial(config, "Qwen2-0.5B"), (256,) if TOY else (16_384, 65_536))
LARGE = Shape("Llama-3-8B, LoRA", partial(config, "Llama-3-8B"), (256,) if TOY else (8_192,), lora=True)
STOCK = [
    Contender(BEST_STOCK, stock_liger, "stock", "flash_attention_4"),
    Contender("stock packed: SDPA, Liger", stock_liger, "stock"),
    *([Contender("stock packed: SDPA", stock, "stock")] if TOY else []),
]
LIMIT = 300  # seconds for a process
REPEAT = 1 if TOY else 10


def run_trainers(chosen: argparse.Namespace) -> Iterator[Result]:
    for name in CONTENDERS:
        yield from measure(SMALL, name, chosen.capacity, chosen.epochs, chosen.repeat)


def run_sft(chosen: argparse.Namespace) -> Iterator[Result]:
    for capacity, name in product(SMALL.capacities, (SFT, SFT_FULL)):
        yield from measure(SMALL, name, capacity, 1, REPEAT)
    yield from _beside(SMALL)


def run_memory(chosen: argparse.Namespace) -> Iterator[Result]:
    for name in (name for name in CONTENDERS if "memory=" in name or "fast=False), check" in name):
        yield from measure(SMALL, name, SMALL.capacities[0], 1, REPEAT)


def run_lora(chosen: argparse.Namespace) -> Iterator[Result]:
    for capacity in LARGE.capacities:
        yield from measure(LARGE, TRAINER, capacity, 1, 1)
    yield from _beside(LARGE)


def _beside(shape: Shape) -> Iterator[Result]:
    """The stock steps: dense masks of 64k tokens do not fit, so SDPA has the shortest rows alone."""
    yield from race(shape, STOCK[:1])
    yield from race(replace(shape, capacities=shape.capacities[:1]), STOCK[1:])


def run_train(chosen: argparse.Namespace) -> Iterator[Result]:
    capacity, steps = (1_024, 4) if TOY else (16_384, 60)
    options = ["--capacity", capacity, "--rows-per-step", 1, "--steps", steps, "--epochs", 4, "--overflow", "split"]
    if chosen.data is not None:
        options += ["--data", chosen.data, "--loss", "all"]
    for name in commands(chosen.ranks):
        contender, case = f"crosspack train {' '.join(name)}", f"rows of {capacity:,}"
        train = partial(by_command, [*map(str, options), *name])
        yield from measured("crosspack train", case, contender, "real tokens/s, median step", train)


def by_command(options: Sequence[str]) -> Figures:
    """Runs ``crosspack train`` in a process of its own; raises the line that says best why it failed, if it did."""
    with TemporaryDirectory() as folder:
        shape, log = Path(folder, "config.json"), Path(folder, "log")
        size = {"vocab_size": 8_192} if TOY else {}  # that of the tokenizer of the command
        shape.write_text(json.dumps(config("Qwen2-0.5B").to_dict() | size))
        command = ["-m", "crosspack", "train", "--model", str(shape), *options, "--output", f"{folder}/run"]
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    [sys.executable, *command], timeout=LIMIT, stdout=output, stderr=subprocess.STDOUT
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"no end after {LIMIT} s") from None
        report = Path(folder, "run", "crosspack.json")
        if not report.exists():
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            reasons = [line for line in lines if "Error" in line or line.startswith("error")]
            raise RuntimeError(f"exit status {done.returncode}: {(reasons or lines or [''])[-1]}")
        content = json.loads(report.read_text())
    records = content["runs"]["packed"]
    timed = records[len(records) // 3 :]
    return {
        "real tokens/s, median step": statistics.median(step["tokens"] / step["seconds"] for step in timed),
        "real tokens/s, mean": sum(step["tokens"] for step in timed) / sum(step["seconds"] for step in timed),
        "first step, s": records[0]["seconds"],
        "GiB at most": content["peak_bytes"].get("packed", 0) / 2**30,
        "last loss": records[-1]["loss"],
        NOTE: content["device"],
    }


def commands(ranks: int) -> list[list[str]]:
    """The options of each ``crosspack train``; on several ranks one row each, beside one rank."""
    bfloat16 = ["--dtype", "bfloat16"]
    if ranks == 1:
        return [["--precision", "bfloat16"], bfloat16, [*bfloat16, "--master-weights"]]
    several = [*bfloat16, "--nproc", str(ranks), "--rows-per-step", str(ranks)]
    return [bfloat16, *([*several, "--strategy", strategy] for strategy in ("ddp", "fsdp"))]


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Result]]] = {
    "trainers": run_trainers,
    "sft": run_sft,
    "memory": run_memory,
    "lora": run_lora,
    "train": run_train,
}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__, [*SECTIONS], ["trainers"])
    options.add_argument("--capacity", type=int, default=256 if TOY else 16_384, help="tokens of a row of trainers")
    options.add_argument("--epochs", type=int, default=1 if TOY else 4, help="of trainers timed, after the warm-up")
    options.add_argument("--repeat", type=int, default=1, help="of the documents of trainers, for epochs of more steps")
    options.add_argument("--data", type=Path, help="prompts and completions of train, a .jsonl file")
    options.add_argument("--ranks", type=int, default=1, help="of train, each with a GPU")
    chosen, results, about = parsed(options, arguments), list[Result](), header()
    for section in chosen.only:
        results += collected(in_turn([section], SECTIONS, chosen), about, chosen.output, section)
    return results


if __name__ == "__main__":
    main()
