"""One fine-tuning run on GSM8K, padded or packed: the same documents in every step, loss curves, time and memory.

    python -m benchmarks.real_runs --contender packed --seed 0 --data gsm8k_train.jsonl --output runs/packed-0.json
    python -m benchmarks.real_runs --contender padded --seed 0 --data gsm8k_train.jsonl --output runs/padded-0.json
    python -m benchmarks.real_runs --contender packed --output packed.json --tiny   # on the CPU, seconds
    python docs/make_results.py runs                                                # the picture of all runs

The Qwen2-0.5B shape with random weights by the seed, float32 weights under bfloat16 autocast, fused AdamW, a byte-level
BPE tokenizer of 8,192 entries trained on the same file. Completions alone are trained. 473 documents are held out, the
others are trained once, in an order by the seed.

The packed rows decide which documents make a step, one row of ``--capacity`` tokens by default, so step N of a seed
holds the same documents in every contender: ``documents`` in the output is their digest. The loss of a step is the
mean over its trained tokens in each of them.

    padded      stock transformers with SDPA, batches of --padded-batch documents in random order, gradients added
    grouped     the same, the documents of a step sorted by length first
    packed      patch(model) and make_train_step

``--precision float8`` is ``make_train_step(precision="float8")`` for packed rows, and torchao's conversion of the stock
model otherwise, so that one sees what float8 costs a loss, and what packing does.

Seconds count from the first step, compiling included and evaluations left out, by CUDA events, so that reading them
slows nothing. A run takes about a minute on an H200: 20 s of start, then about 35 s padded, or 8 s packed after 25 s of
compiling, which later runs on the same machine find in a cache. With ``--epochs 3`` compiling weighs less.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.clock import DEVICE, TOY, highest_gib, reset_peak, synchronize
from benchmarks.report import machine, versions, write_json
from benchmarks.shapes import config
from benchmarks.workload import GSM8K, on_device, random_model
from crosspack.encoding.text import Encoder, Policy
from crosspack.encoding.tokenizer import train_tokenizer
from packing_core import plan
from packing_core.training.options import Options
from packing_core.training.schedule import Corpus, Run, Schedule
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.hf.float8 import Precision, recipe_of

VOCABULARY = 8_192
HELD_OUT = 473
EVALUATIONS = 5  # the last one after the last step
Losses = Callable[[int], Tensor]  # step -> the loss of that step, which is taken


def corpora(path: Path) -> tuple[Corpus, Corpus]:
    """The documents that are trained and those that are held out, tokenised."""
    records = [json.loads(line) for line in path.read_text().split("\n") if line]
    if TOY:
        records = records[:120]
    held_out = len(records) * HELD_OUT // 7_473 or 1
    order = np.random.default_rng(0).permutation(len(records))
    tokenizer = train_tokenizer((r["prompt"] + r["completion"] for r in records), VOCABULARY)

    def corpus(chosen: Any) -> Corpus:
        encode = Encoder(tokenizer, Policy("completion"))
        return Corpus.collect(encode(records[number] for number in chosen.tolist()))

    return corpus(order[held_out:]), corpus(order[:held_out])


def moment() -> Any:
    """Now, on the device: an event, whose reading slows nothing."""
    if TOY:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    return end - begin if TOY else begin.elapsed_time(end) / 1e3


def padded_batches(schedule: Schedule, step: int, run: Run) -> Iterator[dict[str, Tensor]]:
    for batch in schedule.padded(step, run):
        arrays = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.targets}
        yield on_device({name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()})


def autocast() -> Any:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=not TOY)


def padded(
    model: Any,
    optimizer: Any,
    training: Schedule,
    held_out: Schedule,
    run: Run,
    clip: float,
    precision: Precision | None,
) -> tuple[Losses, Callable[[], float]]:
    """As transformers' Trainer trains: the model's own loss, divided by the targets of the whole step."""
    if precision is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(recipe_of(precision))
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name != "lm_head")

    def loss_of(batch: dict[str, Tensor], targets: int) -> Tensor:
        with autocast():
            loss: Tensor = model(**batch, use_cache=False, num_items_in_batch=targets).loss
        return loss

    def take(step: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for batch in padded_batches(training, step, run):
            loss = loss_of(batch, training.trained_tokens[step])
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return total

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        targets = sum(held_out.trained_tokens)
        losses = [loss_of(b, targets) for step in range(len(held_out)) for b in padded_batches(held_out, step, run)]
        model.train()
        return float(torch.stack(losses).sum())

    return take, evaluate


def packed(
    model: Any,
    optimizer: Any,
    training: Schedule,
    held_out: Schedule,
    run: Run,
    clip: float,
    precision: Precision | None,
) -> tuple[Losses, Callable[[], float]]:
    patch(model)
    collate = PackedCollator(model)
    autocast_to = None if TOY else torch.bfloat16
    step_of = make_train_step(model, optimizer, max_grad_norm=clip, autocast=autocast_to, precision=precision)

    def take(step: int) -> Tensor:
        return step_of([collate(row) for row in training.packed(step)])["loss"]

    def evaluate() -> float:
        rows = (collate(row) for step in range(len(held_out)) for row in held_out.packed(step))
        return float(step_of.evaluate(rows)["loss"])

    return take, evaluate


def train(chosen: argparse.Namespace) -> dict[str, Any]:
    """One run; what its JSON says."""
    run: Run = chosen.contender
    train_on, hold = corpora(chosen.data)
    plans = tuple(plan(train_on.documents.lengths, chosen.capacity, seed=chosen.seed + e) for e in range(chosen.epochs))
    training = Schedule(train_on, plans, chosen.rows_per_step, chosen.padded_batch, chosen.seed, chosen.steps)
    kept = plan(hold.documents.lengths, chosen.capacity, seed=0)
    held_out = Schedule(hold, (kept,), chosen.rows_per_step, chosen.padded_batch)
    options = Options(lr=chosen.lr, warmup=0.1, clip=1.0, seed=chosen.seed)
    shape = config("Qwen2-0.5B")
    if TOY:
        shape.vocab_size = VOCABULARY
    model = random_model(shape, dtype=torch.float32, seed=chosen.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0, fused=True)
    make = packed if run == "packed" else padded
    take, evaluate = make(model, optimizer, training, held_out, run, options.clip, chosen.precision)
    losses, moments = list[Tensor](), list[tuple[Any, Any]]()
    evaluated = [{"step": 0, "loss": evaluate()}]
    reset_peak()
    every = max(1, len(training) // EVALUATIONS)
    for step in range(len(training)):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate(step, len(training))
        began = moment()
        losses.append(take(step))
        moments.append((began, moment()))
        done = step + 1
        if done == len(training) or (done % every == 0 and len(training) - done >= every):
            evaluated.append({"step": done, "loss": evaluate()})
            print(f"step {done} of {len(training)}: held-out loss {evaluated[-1]['loss']:.4f}", flush=True)
    synchronize()
    seconds = [seconds_between(*pair) for pair in moments]
    tokens = [step.n_tokens for step in training.steps]
    half = len(training) // 2
    return {
        "contender": run,
        "seed": chosen.seed,
        "device": "cpu" if TOY else torch.cuda.get_device_name(),
        "machine": machine(),
        "versions": versions("torch", "triton", "transformers", "crosspack"),
        "settings": {
            "model": "toy" if TOY else "Qwen2-0.5B shape, random weights, float32 under bfloat16 autocast",
            "precision": chosen.precision or ("float32" if TOY else "bfloat16"),
            "lr": options.lr,
            "capacity": chosen.capacity,
            "rows per step": chosen.rows_per_step,
            "padded batch": chosen.padded_batch,
            "documents": len(train_on.documents),
            "held out": len(hold.documents),
        },
        "documents": _digest(training),
        "tokens": tokens,
        "slots": [training.slots(step, run) for step in range(len(training))],
        "loss": torch.stack(losses).float().tolist(),
        "seconds": seconds,
        "held_out": evaluated,
        "wall_seconds": sum(seconds),
        "first_step_seconds": seconds[0],
        "tokens_per_second": sum(tokens) / sum(seconds),
        "tokens_per_second_second_half": sum(tokens[half:]) / sum(seconds[half:]),
        "peak_bytes": int(highest_gib() * 2**30),
    }


def _digest(schedule: Schedule) -> str:
    """Digests the documents of every step, in any order."""
    return hashlib.sha256(b"".join(np.sort(step.source).tobytes() for step in schedule.steps)).hexdigest()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--contender", choices=("padded", "grouped", "packed"), required=True)
    options.add_argument("--seed", type=int, default=0, help="of initial weights and the order of documents")
    options.add_argument("--data", type=Path, default=GSM8K, help="a .jsonl file of prompts and completions")
    options.add_argument("--output", type=Path, required=True, help="the JSON file")
    options.add_argument("--capacity", type=int, default=1_024 if TOY else 8_192, help="tokens of a row")
    options.add_argument("--rows-per-step", type=int, default=1)
    options.add_argument("--padded-batch", type=int, default=32, help="documents of a padded batch")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--steps", type=int, help="stop after that many")
    options.add_argument("--lr", type=float, default=5e-4, help="peak learning rate")
    options.add_argument("--precision", choices=get_args(Precision), help="of linear layers, in place of bfloat16")
    options.add_argument("--tiny", action="store_true", help="a tiny model and 120 documents, on the CPU")
    chosen = options.parse_args()
    record = train(chosen)
    write_json(chosen.output, record)
    run = f"{record['contender']}, {record['settings']['precision']}, seed {record['seed']}"
    print(
        f"{run}: {len(record['loss'])} steps in {record['wall_seconds']:.1f} s, "
        f"{record['tokens_per_second']:,.0f} real tokens/s ({record['tokens_per_second_second_half']:,.0f} in the "
        f"second half), {record['peak_bytes'] / 2**30:.1f} GiB, loss {record['loss'][0]:.4f} to "
        f"{record['loss'][-1]:.4f}, held out {record['held_out'][-1]['loss']:.4f}"
    )


if __name__ == "__main__":
    main()
