"""Shared prefixes: updates of GRPO and DPO whose prompts are computed once, against unshared packing and padding.

    python -m benchmarks.gpu_trees                     # Qwen3-4B shape by LoRA, then DPO of the 0.5B shape, bfloat16
    python -m benchmarks.gpu_trees --match "^shared"   # contenders whose name matches
    python -m benchmarks.gpu_trees --case "8 x 256 after 4,096" --no-dpo
    python -m benchmarks.gpu_trees --case "8 x 512 after 512" --no-dpo --profile  # and kernels by kind
    python -m benchmarks.gpu_trees --match enable_packing  # DPO alone
    python -m benchmarks.gpu_trees --steps             # steps of the 0.5B shape instead: CUDA graphs over forests
    python -m benchmarks.gpu_trees --budget 500        # begin no contender after so many seconds
    python -m benchmarks.gpu_trees --tiny              # everything on the CPU; its times mean nothing

A GRPO update: log-probabilities of all answers of one group, the clipped ratio times advantages, backward, and the
optimizer's step, with adapters of rank 16 on random weights and gradient checkpointing. Answers are lognormal with the
mean that the case names. All contenders update on the same answers; their losses are compared first. Memory is the most
that was allocated in an update, less what was before it (activations and gradients). Times are the median of the
updates after the first. Of "8 x 512 after 512", the adapters' updates compute 1.62 times the tokens unshared, but the
head sees the same tokens of answers either way, and attention has 1.2 times the pairs of queries and keys.

``--steps`` times ``make_train_step`` on rows of 8,192 tokens of groups of 8 answers of mean 256 to prompts of 512.

DPO runs TRL's DPOTrainer on pairs whose prompt and answers are equally long.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import gpu_preference
from benchmarks.gpu import as_table, header, in_one_line, survived, write
from benchmarks.gpu_clock import (
    DEVICE,
    TOY,
    Result,
    highest_gib,
    seconds_left,
    set_budget,
    set_match,
    synchronize,
    wanted,
)
from benchmarks.gpu_preference import qwen3_4b
from benchmarks.gpu_profile import Profile
from benchmarks.gpu_workload import DTYPE
from torch_backend import PackedCollator, make_train_step, patch, spread, token_logprobs

SECTION = "shared prefixes" if not TOY else "shared prefixes, toy"
SCALE = 32 if TOY else 1  # by which lengths are divided
WORDS = 190 if TOY else 100_000
LOSS_TOLERANCE = 1e-4 if TOY else 2e-2
Features = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Documents of one update: leaves of a tree.

    Attributes:
        levels: (children of every node, tokens of each), from the root down; the last level are answers, of that mean.
    """

    name: str
    levels: tuple[tuple[int, int], ...]


CASES = (
    Case("8 x 256 after 4,096", ((1, 4_096), (8, 256))),
    Case("8 x 512 after 512", ((1, 512), (8, 512))),
    Case("20 leaves of depth 3", ((1, 2_048), (4, 1_024), (5, 256))),
    Case("8 x 256 after 32", ((1, 32), (8, 256))),
)


def documents(case: Case, seed: int = 0) -> Features:
    """The answers of a case behind what leads to them, as token ids with labels."""
    generator = np.random.default_rng(seed)

    def drawn(mean: int, answer: bool) -> list[int]:
        mean = max(2, mean // SCALE)
        length = int(np.clip(generator.lognormal(np.log(mean) - 0.125, 0.5), 2, 4 * mean)) if answer else mean
        ids: list[int] = generator.integers(4, WORDS, length).tolist()
        return ids

    paths: list[list[int]] = [[]]
    for children, mean in case.levels[:-1]:
        paths = [path + drawn(mean, False) for path in paths for _ in range(children)]
    answers, mean = case.levels[-1]
    found = []
    for path in paths:
        for _ in range(answers):
            answer = drawn(mean, True)
            found.append({"input_ids": path + answer, "labels": [-100] * len(path) + answer})
    return found


def contenders() -> dict[str, Callable[[Any, Features], tuple[Callable[[], Tensor], int]]]:
    """Name -> (model, documents) -> what computes the loss of an update, and the tokens that its layers compute."""
    return {
        "shared": lambda model, features: _packed(model, features, True),
        "shared, auto": lambda model, features: _packed(model, features, "auto"),
        "unshared": lambda model, features: _packed(model, features, False),
        "stock, sdpa, padded": _stock,
    }


def _packed(model: Any, features: Features, share: Any) -> tuple[Callable[[], Tensor], int]:
    model = patch(model, verify=False)
    batch = PackedCollator(model, share_prefix=share)(features)
    batch = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in batch.items()}
    advantages = spread(_advantages(len(features)), batch)
    trained = batch["labels"] != -100

    def loss() -> Tensor:
        logprobs = token_logprobs(model, batch).logprobs
        return -((logprobs - logprobs.detach()).exp() * advantages * trained).sum() / trained.sum()

    return loss, batch["input_ids"].numel()


def _stock(model: Any, features: Features) -> tuple[Callable[[], Tensor], int]:
    longest = max(len(feature["input_ids"]) for feature in features)
    ids, labels, mask = (torch.full((len(features), longest), fill) for fill in (0, -100, 0))
    for row, feature in enumerate(features):
        length = len(feature["input_ids"])
        ids[row, :length], labels[row, :length] = (torch.tensor(feature[name]) for name in ("input_ids", "labels"))
        mask[row, :length] = 1
    ids, labels, mask = (x.to(DEVICE) for x in (ids, labels, mask))
    kept = longest - int((labels != -100).int().argmax(1).min()) + 1
    targets, trained = labels[:, -kept + 1 :].clamp(min=0), labels[:, -kept + 1 :] != -100
    advantages = _advantages(len(features))[:, None]

    def loss() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=kept, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return -((logprobs - logprobs.detach()).exp() * advantages * trained).sum() / trained.sum()

    return loss, ids.numel()


def _advantages(count: int) -> Tensor:
    return torch.linspace(-1, 1, count, device=DEVICE) + 0.1


def build() -> Any:
    """Random weights of the Qwen3-4B shape with adapters that train."""
    import peft

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(qwen3_4b(False), attn_implementation="sdpa", dtype=DTYPE)
    adapter = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, adapter).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def measure(name: str, case: Case, updates: int, *, profile: bool = False) -> Iterator[Result]:
    """Times the updates of one contender; with ``profile``, prints the kernels of one more update."""
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    loss, tokens = contenders()[name](model, documents(case))
    times, peaks, first = [], [], 0.0

    def update() -> float:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(found.detach())

    for _ in range(updates + 1):
        synchronize()
        before = 0 if TOY else torch.cuda.memory_allocated()
        if not TOY:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        found = update()
        synchronize()
        times.append(time.perf_counter() - begin)
        peaks.append(0.0 if TOY else (torch.cuda.max_memory_allocated() - before) / 2**30)
        first = first or found
    if profile:
        seen = Profile()
        seen.start()
        update()
        seen.stop()
        print(f"{case.name}, {name}\n\n{seen.report(1)}", flush=True)
    yield Result(SECTION, case.name, name, statistics.median(times[1:]) * 1e3, "ms an update")
    yield Result(SECTION, case.name, name, max(peaks), "GiB of activations")
    yield Result(SECTION, case.name, name, float(tokens), "tokens computed")
    yield Result(SECTION, case.name, name, times[0], "s for the first update")
    yield Result(SECTION, case.name, name, first, "first loss")


def verdict(case: str, results: Sequence[Result]) -> list[str]:
    """Compares shared prefixes with every other contender; says where their losses do not agree."""
    figures = {(r.contender, r.unit): r.value for r in results if r.case == case and r.value is not None}
    lines = []
    for other in ("unshared", "stock, sdpa, padded"):
        for shared in ("shared", "shared, auto"):
            pairs = {unit: (figures.get((other, unit)), figures.get((shared, unit))) for _, unit in figures}
            speed, memory, loss = (
                pairs.get(u, (None, None)) for u in ("ms an update", "GiB of activations", "first loss")
            )
            if speed[0] is None or speed[1] is None:
                continue
            agree = loss[0] is not None and loss[1] is not None and abs(loss[0] - loss[1]) <= LOSS_TOLERANCE
            ratio = f"{memory[0] / memory[1]:.2f} times less activation memory" if memory[0] and memory[1] else ""
            wrong = "" if agree else f", WRONG: losses {loss[0]} and {loss[1]}"
            lines.append(f"{case}: {shared} is {speed[0] / speed[1]:.2f} times as fast as {other}, {ratio}{wrong}")
    return lines


def measure_dpo(updates: int) -> Iterator[Result]:
    """DPO of the 0.5B shape, whose prompts are as long as each answer: 512 tokens."""
    generator = np.random.default_rng(0)
    length = 512 // SCALE

    def drawn() -> list[int]:
        ids: list[int] = generator.integers(4, WORDS, length).tolist()
        return ids

    count = gpu_preference.PAIRS_PER_UPDATE * (gpu_preference.WARM_UP + updates)
    sizes = (2,) if TOY else (8, 16)  # of micro-batches: the host starts as many kernels for one, whatever its size
    pairs = [
        {"prompt_ids": drawn(), "chosen_ids": drawn(), "rejected_ids": drawn(), "length": 2 * length}
        for _ in range(count)
    ]
    for micro, share in product(sizes, (True, False)):
        contender = gpu_preference.Contender(True, micro, False, share_prefix=share)
        if wanted(contender.name) and seconds_left() >= 0:
            yield from gpu_preference.measure(contender, "0.5B", updates, section=f"{SECTION}, DPO", pairs=pairs)


STEPS = {
    "shared, CUDA graph": (True, {"capture": True}),
    "shared, compiled": (True, {}),
    "shared, as usual": (True, {"compile": False, "capture": False}),
    "unshared, CUDA graph": (False, {}),
}


def measure_steps(name: str, updates: int) -> Iterator[Result]:
    """Times steps of ``make_train_step`` on rows of one capacity, in answers per second."""
    share, options = STEPS[name]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(gpu_preference.SHAPES["0.5B"](False), dtype=DTYPE)
    model = patch(model, verify=False).train()
    step = make_train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=not TOY), **options)
    collate = PackedCollator(model, 8_192 // SCALE, share_prefix=share, overflow="repeat" if share else "error")
    groups = [documents(Case("", ((1, 512), (8, 256))), seed=seed) for seed in range(4 * (updates + 4))]
    times, answers, first = [], 0, 0.0
    for number in range(updates + 4):  # the first ones compile and record
        features = list(chain.from_iterable(groups[4 * number : 4 * number + 4]))
        rows = collate.pack(features)
        batch = [collate(rows[row]) for row in range(len(rows))]
        synchronize()
        begin = time.perf_counter()
        loss = step(batch)["loss"]
        synchronize()
        first = first or float(loss)
        if number >= 4:
            times.append(time.perf_counter() - begin)
            answers += len(features)
    case = "8 x 256 after 512, rows of 8,192"
    yield Result(SECTION, case, name, answers / sum(times), "answers/s")
    yield Result(SECTION, case, name, highest_gib(), "GiB at most")
    yield Result(SECTION, case, name, first, "first loss")
    print(f"{name}: {step.parts}", flush=True)


def dpo_verdict(results: Sequence[Result]) -> list[str]:
    """Compares pairs per second with and without shared prefixes, by the size of micro-batches."""
    speed = {r.contender: r.value for r in results if r.section.endswith("DPO") and r.unit == "pairs/s" and r.value}
    lines = []
    for name, unshared in speed.items():
        shared = speed.get(name.replace("enable_packing,", "enable_packing(share_prefix=True),"))
        if shared and "share_prefix" not in name:
            lines.append(f"DPO, {name.partition(', ')[2]}: shared is {shared / unshared:.2f} times as fast as unshared")
    return lines


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    options.add_argument("--case", choices=names, nargs="+", default=names)
    options.add_argument("--updates", type=int, default=1 if TOY else 5, help="timed, after the first")
    options.add_argument("--match", default="", metavar="PATTERN", help="only contenders whose name it matches")
    options.add_argument("--budget", type=float, metavar="SECONDS", help="begin no contender after that")
    options.add_argument("--no-dpo", action="store_true", help="the updates of GRPO alone")
    options.add_argument("--profile", action="store_true", help="print the kernels of an update of each contender")
    options.add_argument("--steps", action="store_true", help="of make_train_step, in place of updates of GRPO and DPO")
    options.add_argument("--output", type=Path, help="folder for gpu.json")
    options.add_argument("--tiny", action="store_true", help="on the CPU, to see that everything runs")
    chosen = options.parse_args(arguments)
    set_match(chosen.match)
    if chosen.budget:
        set_budget(chosen.budget)
    about = header()
    print(about, flush=True)
    results: list[Result] = []

    def add(name: str, found: list[Result]) -> None:
        results.extend(found)
        print(f"{name}: {in_one_line(found)}", flush=True)
        if chosen.output:
            write(chosen.output, about, results)
        gc.collect()
        if not TOY:
            torch.cuda.empty_cache()

    if chosen.steps:
        for name in STEPS:
            if wanted(name) and seconds_left() >= 0:
                if not TOY:
                    torch.cuda.reset_peak_memory_stats()
                add(name, list(survived(name, measure_steps(name, chosen.updates))))
        print(f"\n{as_table(results)}")
        return results
    for case in (case for case in CASES if case.name in chosen.case):
        for name in contenders():
            if wanted(name) and seconds_left() >= 0:
                found = measure(name, case, chosen.updates, profile=chosen.profile)
                add(f"{case.name}, {name}", list(survived(name, found)))
        print("\n".join(verdict(case.name, results)), flush=True)
    if not chosen.no_dpo:
        add("DPO", list(survived("DPO", measure_dpo(chosen.updates))))
        print("\n".join(dpo_verdict(results)), flush=True)
    print(f"\n{as_table(results)}")
    return results


if __name__ == "__main__":
    main()
