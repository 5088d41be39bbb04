"""DPO by TRL's DPOTrainer: as it is, under its best settings, and after enable_packing.

    python -m benchmarks.gpu_preference                      # 0.5B and 4B shapes, bfloat16 weights, fused AdamW
    python -m benchmarks.gpu_preference --shape 4B --match "sdpa, group_by_length, micro-batches of (2|4)"
    python -m benchmarks.gpu_preference --match "^enable_packing.*of 8$"  # layers compiled, and as they are
    python -m benchmarks.gpu_preference --lora               # adapters of rank 16 on all linear layers, no second model
    python -m benchmarks.gpu_preference --profile            # one more update: GPU busy, gaps, kernels
    python -m benchmarks.gpu_preference --budget 500         # begin no contender after so many seconds
    python -m benchmarks.gpu_preference --tiny               # every contender on the CPU; its times mean nothing

Pairs are like those of UltraFeedback: a prompt that both answers share (lognormal, mean 200 tokens) and two answers
(lognormal, mean 600), 2,048 tokens at most. Every contender makes the same number of updates of 32 pairs on the same
pairs, with random weights, a reference model beside the policy, gradient checkpointing or not, and micro-batches of
several sizes. The first updates warm up, the next ones are timed as a whole. Memory is the most that was allocated in
the whole run. A contender that fails, for lack of memory too, is a line in the table. The last lines compare the
fastest stock setting with the fastest packed one that takes no more memory. Of stock's tokens 73 to 81% are real by
``group_by_length``, its best setting, in micro-batches of 8 to 1; in random order 50 to 81%.

TRL is needed (``pip install trl``); where it cannot be installed, unpack its wheel into a folder on ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.clock import TOY, StepClock, header
from benchmarks.harness import Figures, measured, parsed, parser
from benchmarks.report import Result, collected
from benchmarks.shapes import config
from benchmarks.workload import random_model, tokenizer, trainer_options
from torch_backend import enable_packing

SECTION = "preference" if not TOY else "preference, toy"
PAIRS_PER_UPDATE = 4 if TOY else 32
LONGEST, PROMPT, ANSWER, SPREAD = (96, 12, 24, 0.6) if TOY else (2_048, 200, 600, 0.6)
WARM_UP = 1 if TOY else 8


@dataclass(frozen=True)
class Contender:
    """The options of a trainer's run.

    Attributes:
        packed: whether packing is enabled.
        micro: pairs of a micro-batch.
        checkpointing: of gradients.
        sampling: the order of the pairs; by length, little of a padded batch is padding.
        attention: transformers' implementation of the stock model.
        fast: whether the packed model's layers are compiled.
    """

    packed: bool
    micro: int
    checkpointing: bool
    sampling: str = "random"
    attention: str = "sdpa"
    fast: bool = True

    @property
    def name(self) -> str:
        packed = "enable_packing" if self.fast else "enable_packing(fast=False)"
        who = packed if self.packed else f"stock, {self.attention}, {self.sampling}"
        return f"{who}, micro-batches of {self.micro}{', checkpointing' if self.checkpointing else ''}"


def contenders() -> list[Contender]:
    """Packed ones first, so that their result survives a run that is cut short."""
    sizes = (2,) if TOY else (1, 2, 4, 8, 16)
    runs = [(micro, checkpointing) for checkpointing in (False, True) for micro in sizes]
    packed = [Contender(True, *options, fast=fast) for fast in (True, False) for options in runs]
    stock = product(("sdpa", "flash_attention_2"), ("random", "group_by_length"), runs)
    return packed + [Contender(False, *options, sampling, attention) for attention, sampling, options in stock]


SHAPES = {"0.5B": "Qwen2-0.5B", "4B": "Qwen3-4B"}


def preference_pairs(count: int) -> list[dict[str, Any]]:
    """Prompts and two answers for each, as token ids, with the length of both together for sampling by length."""
    generator = np.random.default_rng(0)

    def tokens(mean: float, most: int) -> list[int]:
        length = generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD)
        ids: list[int] = generator.integers(4, 190 if TOY else 100_000, int(np.clip(length, 4, most))).tolist()
        return ids

    pairs = []
    for _ in range(count):
        prompt = tokens(PROMPT, LONGEST // 2)
        chosen, rejected = (tokens(ANSWER, LONGEST - len(prompt)) for _ in range(2))
        longest = len(prompt) + max(len(chosen), len(rejected))
        pairs.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, "length": longest})
    return pairs


def build(contender: Contender, shape: str, pairs: Any, lora: bool, folder: str, updates: int, callback: Any) -> Any:
    """A DPOTrainer over random weights, whose pairs are tokens already."""
    import trl
    from peft import LoraConfig

    class Tokenised(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    attention = "sdpa" if contender.packed else contender.attention
    model = random_model(config(SHAPES[shape]), attention)
    reference = None if lora else random_model(config(SHAPES[shape]), attention, seed=1)
    options = trainer_options(
        updates, per_device_train_batch_size=contender.micro, learning_rate=1e-6, bf16=not TOY, logging_steps=updates,
        gradient_accumulation_steps=PAIRS_PER_UPDATE // contender.micro, remove_unused_columns=False,
        gradient_checkpointing=contender.checkpointing, train_sampling_strategy=contender.sampling,
        length_column_name="length", max_length=None,
    )  # fmt: skip
    return Tokenised(
        model, reference, args=trl.DPOConfig(folder, **options), train_dataset=pairs,
        processing_class=tokenizer(), callbacks=[callback],
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )  # fmt: skip


def trainer_run(
    contender: Contender, make: Callable[[str, int, Any], Any], of_update: tuple[float, str], chosen: Any
) -> Figures:
    """Times updates of a trainer after the warm-up, and profiles one more if ``--profile`` is chosen.

    Args:
        make: a folder, the number of updates and a callback -> the trainer.
        of_update: what an update has, and the unit of that per second.
    """
    clock, profiled = StepClock(chosen.warm_up, chosen.updates), chosen.profile
    with TemporaryDirectory() as folder:
        trainer = make(folder, clock.last + profiled, clock.callback(profiled))
        if contender.packed:
            enable_packing(trainer, verify=False, fast=contender.fast)
        trainer.train()
        if contender.packed:
            print(contender.name, trainer.packed_step.parts, flush=True)
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        trainer.accelerator.free_memory()
    amount, unit = of_update
    return {
        unit: amount * clock.timed / clock.seconds,
        "GiB at most": clock.peak,
        "mean loss": float(loss),
        "s to the first update": clock.first,
    }


def verdict(shape: str, results: Sequence[Result], unit: str = "pairs/s") -> str:
    """The fastest stock setting, and the fastest packed one within its memory."""
    figures: dict[str, dict[str, float]] = {}
    for result in results:
        if result.case == shape and result.value is not None:
            figures.setdefault(result.contender, {})[result.unit] = result.value
    stock = {name: of for name, of in figures.items() if name.startswith("stock")}
    packed = {name: of for name, of in figures.items() if not name.startswith("stock")}
    if not stock or not packed:
        return f"{shape}: nothing to compare"
    best = max(stock, key=lambda name: stock[name][unit])
    within = [name for name in packed if packed[name]["GiB at most"] <= stock[best]["GiB at most"]]
    lines = [f"{shape}: {best}: {_figures(stock[best], unit)}"]
    for what, names in (("within its memory", within), ("whatever its memory", list(packed))):
        if names:
            ours = max(names, key=lambda name: packed[name][unit])
            ratio = packed[ours][unit] / stock[best][unit]
            lines.append(f"    {ratio:.2f} times as fast {what}: {ours}: {_figures(packed[ours], unit)}")
    return "\n".join(lines)


def _figures(figures: dict[str, float], unit: str) -> str:
    return f"{figures[unit]:,.2f} {unit}, {figures['GiB at most']:.1f} GiB"


def add_options(options: argparse.ArgumentParser) -> None:
    """Add those of runs of trainers by updates."""
    options.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    options.add_argument("--updates", type=int, default=1 if TOY else 4, help="timed, after the warm-up")
    options.add_argument("--warm-up", type=int, default=WARM_UP, help="updates that are not timed")
    options.add_argument("--profile", action="store_true", help="one more update: GPU busy, gaps and kernels")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    add_options(options)
    options.add_argument(
        "--lora", action="store_true", help="train adapters, whose reference is the model without them"
    )
    chosen = parsed(options, arguments)
    results = collected(run(chosen), header(), chosen.output, "gpu_preference")
    for case in dict.fromkeys(result.case for result in results):
        print(verdict(case, results), flush=True)
    return results


def run(chosen: Any) -> Iterator[Result]:
    from datasets import Dataset

    updates = chosen.warm_up + chosen.updates + chosen.profile
    pairs = Dataset.from_list(preference_pairs(PAIRS_PER_UPDATE * updates))
    for shape, contender in product(chosen.shape, contenders()):
        make = partial(build, contender, shape, pairs, chosen.lora)
        measure = partial(trainer_run, contender, make, (PAIRS_PER_UPDATE, "pairs/s"), chosen)
        case = f"{shape}, LoRA" if chosen.lora else shape
        yield from measured(SECTION, case, contender.name, "pairs/s", measure)


if __name__ == "__main__":
    main()
