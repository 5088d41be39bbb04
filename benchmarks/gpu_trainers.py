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
    liger       Trainer and SFTTrainer after enable_packing without Liger, with use_liger_kernel=True, and without it in
                the process that Liger changed, rows of 16,384; needs liger-kernel
    lora        Trainer with LoRA adapters on the Llama-3-8B shape, rows of 8,192, beside the best stock step
    lora_full   the same, both recomputing their layers: memory="full", and gradient checkpointing of the stock steps
    train       crosspack train on the Qwen2-0.5B shape, float32 weights under autocast and bfloat16 weights

Contenders of "trainers", "sft", "lora" and "lora_full" train on the same packed rows, one row a step: 480 documents
of mean 243 and at most 2,048 tokens, in the fewest rows, evened out so that the rows are full. Tokens per second count
real tokens.
Memory is the most that was allocated over the whole run, and over the timed epochs alone. Losses are printed so that
contenders can be compared; that they are exact is tested elsewhere (``benchmarks.gpu --only step``,
``tests/torch_backend``). The best stock step is that of ``benchmarks.gpu_step``, by hand and on the same documents.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import TOY, Result, free, wanted
from benchmarks.gpu_step import BEST_STOCK, Contender, race, stock, stock_checkpointing, stock_liger
from benchmarks.gpu_trainer_runs import CONTENDERS, measure
from benchmarks.gpu_workload import Shape, llama3, qwen2

SMALL = Shape("toy" if TOY else "Qwen2-0.5B", qwen2, (256,) if TOY else (16_384, 65_536))
LARGE = Shape("toy, LoRA", qwen2, (256,), lora=True) if TOY else Shape("Llama-3-8B, LoRA", llama3, (8_192,), lora=True)
STOCK = [
    Contender(BEST_STOCK, stock_liger, "stock", "flash_attention_4"),
    Contender("stock packed: SDPA, Liger", stock_liger, "stock"),
    *([Contender("stock packed: SDPA", stock, "stock")] if TOY else []),
]
STOCK_FULL = [
    *([] if TOY else [Contender(f"{STOCK[0].name}, checkpointing", stock_checkpointing, "stock", "flash_attention_4")]),
    Contender("stock packed: SDPA, checkpointing", partial(stock_checkpointing, liger=not TOY), "stock"),
]
TRAINER_FULL = 'Trainer, enable_packing(memory="full")'
TRAINER, SFT = "Trainer, enable_packing", "SFTTrainer(packing=True), enable_packing"
TRAINER_LIGER = "Trainer(use_liger_kernel=True), enable_packing"
SFT_LIGER = "SFTTrainer(packing=True, use_liger_kernel=True), enable_packing"
SFT_FULL = "SFTTrainer(packing=False), enable_packing"
LIMIT = 300  # seconds for a process


def trainers(chosen: argparse.Namespace) -> Iterator[Result]:
    for name in filter(wanted, CONTENDERS):
        yield from _measured(SMALL, name, chosen.capacity, chosen.epochs, chosen.repeat)


def sft(chosen: argparse.Namespace) -> Iterator[Result]:
    for capacity, name in product(SMALL.capacities, filter(wanted, (SFT, SFT_FULL))):
        yield from _measured(SMALL, name, capacity, 1, 1 if TOY else 10)
    yield from _beside(SMALL)


def memory(chosen: argparse.Namespace) -> Iterator[Result]:
    for name in filter(wanted, (name for name in CONTENDERS if "memory=" in name or "fast=False), check" in name)):
        yield from _measured(SMALL, name, SMALL.capacities[0], 1, 1 if TOY else 10)


def liger(chosen: argparse.Namespace) -> Iterator[Result]:
    """Plain trainers come first and last: Liger changes the process."""
    for name in filter(wanted, (TRAINER, SFT, TRAINER_LIGER, SFT_LIGER)):
        yield from _measured(SMALL, name, SMALL.capacities[0], 1, 1 if TOY else 10)
    for name in filter(wanted, (TRAINER, SFT)):
        for found in _measured(SMALL, name, SMALL.capacities[0], 1, 1 if TOY else 10):
            yield replace(found, contender=f"{found.contender}, after Liger")


def lora(chosen: argparse.Namespace) -> Iterator[Result]:
    for capacity in LARGE.capacities:
        yield from _measured(LARGE, TRAINER, capacity, 1, 1)
    yield from _beside(LARGE)


def lora_full(chosen: argparse.Namespace) -> Iterator[Result]:
    if wanted(TRAINER_FULL):
        yield from _measured(LARGE, TRAINER_FULL, LARGE.capacities[0], 1, 1)
    yield from race(LARGE, STOCK_FULL)


def _measured(shape: Shape, name: str, capacity: int, epochs: int, repeat: int) -> Iterator[Result]:
    yield from measure(shape, name, capacity, epochs, repeat)
    torch._dynamo.reset()
    free()


def _beside(shape: Shape) -> Iterator[Result]:
    """The stock steps: dense masks of 64k tokens do not fit, so SDPA has the shortest rows alone."""
    yield from race(shape, STOCK[:1])
    yield from race(Shape(shape.name, shape.make, shape.capacities[:1], lora=shape.lora), STOCK[1:])


def train(chosen: argparse.Namespace) -> Iterator[Result]:
    capacity, steps = (1_024, 4) if TOY else (16_384, 60)
    size = {"vocab_size": 8_192} if TOY else {}  # that of the tokenizer of the command
    options = ["--capacity", capacity, "--rows-per-step", 1, "--steps", steps, "--epochs", 4, "--overflow", "split"]
    if chosen.data is not None:
        options += ["--data", chosen.data, "--loss", "all"]
    for name in commands(chosen.ranks):
        contender, case = f"crosspack train {' '.join(name)}", f"rows of {capacity:,}"
        if not wanted(contender):
            continue
        with TemporaryDirectory() as folder:
            config = Path(folder, "config.json")
            config.write_text(json.dumps(qwen2(False).to_dict() | size))
            command = ["-m", "crosspack", "train", "--model", config, *options, *name, "--output", f"{folder}/run"]
            log = _run([str(part) for part in command])
            try:
                found = json.loads(Path(folder, "run", "crosspack.json").read_text())
            except FileNotFoundError:
                yield Result("crosspack train", case, contender, None, "real tokens/s", log)
                continue
        records = found["runs"]["packed"]
        timed = records[len(records) // 3 :]
        figures = {
            "real tokens/s, median step": statistics.median(each["tokens"] / each["seconds"] for each in timed),
            "real tokens/s, mean": sum(each["tokens"] for each in timed) / sum(each["seconds"] for each in timed),
            "first step, s": records[0]["seconds"],
            "GiB at most": found["peak_bytes"].get("packed", 0) / 2**30,
            "last loss": records[-1]["loss"],
        }
        for unit, value in figures.items():
            yield Result("crosspack train", case, contender, value, unit, found["device"])


def commands(ranks: int) -> list[list[str]]:
    """The options of each ``crosspack train``; on several ranks one row each, beside one rank."""
    bfloat16 = ["--dtype", "bfloat16"]
    if ranks == 1:
        return [["--precision", "bfloat16"], bfloat16, [*bfloat16, "--master-weights"]]
    several = [*bfloat16, "--nproc", str(ranks), "--rows-per-step", str(ranks)]
    return [bfloat16, *([*several, "--strategy", strategy] for strategy in ("ddp", "fsdp"))]


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Result]]] = {
    "trainers": trainers,
    "sft": sft,
    "memory": memory,
    "liger": liger,
    "lora": lora,
    "lora_full": lora_full,
    "train": train,
}


def _run(command: Sequence[str]) -> str:
    """Run Python in a process of its own; the line that says best why it failed, if it did."""
    try:
        done = subprocess.run(
            [sys.executable, *command], text=True, timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    reasons = [line for line in lines if "Error" in line or line.startswith("error")]
    return f"exit status {done.returncode}: {(reasons or lines or [''])[-1][:160]}"


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=["trainers"], help="sections, trainers if none")
    options.add_argument("--capacity", type=int, default=256 if TOY else 16_384, help="tokens of a row of trainers")
    options.add_argument("--epochs", type=int, default=1 if TOY else 4, help="of trainers timed, after the warm-up")
    options.add_argument("--repeat", type=int, default=1, help="of the documents of trainers, for epochs of more steps")
    options.add_argument("--data", type=Path, help="prompts and completions of train, a .jsonl file")
    options.add_argument("--ranks", type=int, default=1, help="of train, each with a GPU")
    chosen = parsed(options, arguments)
    results: list[Result] = []
    for section in chosen.only:
        found = survived(section, SECTIONS[section](chosen))
        results += collected(found, chosen.output, section)
    return results


if __name__ == "__main__":
    main()
