"""DPO by TRL's DPOTrainer: as it is, under its best settings, and after enable_packing.

    python -m benchmarks.gpu_preference                      # 0.5B and 4B shapes, bfloat16 weights, fused AdamW
    python -m benchmarks.gpu_preference --shape 4B --match "sdpa, group_by_length, micro-batches of (2|4)"
    python -m benchmarks.gpu_preference --match "^enable_packing.*of 8$"  # layers compiled, and as they are
    python -m benchmarks.gpu_preference --lora               # adapters of rank 16 on all linear layers, no second model
    python -m benchmarks.gpu_preference --profile            # two more updates: GPU idle by gap, host time by function
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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import DEVICE, TOY, Result, failed, free, highest_gib, seconds_left, synchronize, wanted
from benchmarks.gpu_profile import DeviceProfile, HostProfile
from benchmarks.gpu_workload import DTYPE, qwen2
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
    found = [
        Contender(True, micro, checkpointing, fast=fast)
        for fast in (True, False)
        for checkpointing in (False, True)
        for micro in sizes
    ]
    for attention in ("sdpa", "flash_attention_2"):
        for sampling in ("random", "group_by_length"):
            found += [Contender(False, micro, c, sampling, attention) for c in (False, True) for micro in sizes]
    return found


def qwen3_4b(few: bool) -> Any:
    """The shape of Qwen3-4B."""
    from transformers import Qwen3Config

    if TOY:
        return qwen2(few)
    return Qwen3Config(
        hidden_size=2_560, intermediate_size=9_728, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=2 if few else 36, vocab_size=151_936, tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )  # fmt: skip


SHAPES = {"0.5B": qwen2, "4B": qwen3_4b}


def preference_pairs(count: int) -> list[dict[str, Any]]:
    """Prompts and two answers for each, as token ids, with the length of both together for sampling by length."""
    generator = np.random.default_rng(0)

    def tokens(mean: float, most: int) -> list[int]:
        length = generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD)
        ids: list[int] = generator.integers(4, 190 if TOY else 100_000, int(np.clip(length, 4, most))).tolist()
        return ids

    found = []
    for _ in range(count):
        prompt = tokens(PROMPT, LONGEST // 2)
        chosen, rejected = (tokens(ANSWER, LONGEST - len(prompt)) for _ in range(2))
        longest = len(prompt) + max(len(chosen), len(rejected))
        found.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, "length": longest})
    return found


def build(
    contender: Contender, make: Any, pairs: Any, folder: str, updates: int, clock: Any, *, lora: bool = False
) -> Any:
    """A DPOTrainer over random weights, whose pairs are tokens already."""
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    class Tokenised(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        attention = "sdpa" if contender.packed else contender.attention
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(make(False), attn_implementation=attention, dtype=DTYPE)

    arguments = trl.DPOConfig(
        folder, max_steps=updates, per_device_train_batch_size=contender.micro,
        gradient_accumulation_steps=PAIRS_PER_UPDATE // contender.micro, learning_rate=1e-6,
        lr_scheduler_type="constant", optim="adamw_torch_fused", gradient_checkpointing=contender.checkpointing,
        train_sampling_strategy=contender.sampling, length_column_name="length", max_length=None, bf16=not TOY,
        logging_steps=updates, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=TOY,
        remove_unused_columns=False,
    )  # fmt: skip
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    trainer = Tokenised(
        model(0), None if lora else model(1), args=arguments, train_dataset=pairs, processing_class=tokenizer(),
        callbacks=[clock], peft_config=adapters,
    )  # fmt: skip
    if not contender.packed:
        return trainer
    return enable_packing(trainer, verify=False, fast=contender.fast)


def measure(
    contender: Contender, shape: str, updates: int, profiled: int = 0, *, warm_up: int = WARM_UP, lora: bool = False
) -> Iterator[Result]:
    """Times a run of one contender, and profiles ``profiled`` updates after those that are timed."""
    from datasets import Dataset

    data = Dataset.from_list(preference_pairs(PAIRS_PER_UPDATE * (warm_up + updates + profiled)))

    def make(folder: str, total: int, clock: Any) -> Any:
        return build(contender, SHAPES[shape], data, folder, total, clock, lora=lora)

    case = f"{shape}, LoRA" if lora else shape
    yield from trainer_run(SECTION, case, contender, make, (PAIRS_PER_UPDATE, "pairs/s"), updates, profiled, warm_up)


def trainer_run(
    section: str,
    case: str,
    contender: Any,
    make: Callable[[str, int, Any], Any],
    of_update: tuple[float, str],
    updates: int,
    profiled: int,
    warm_up: int = WARM_UP,
) -> Iterator[Result]:
    """Times ``updates`` of a trainer after ``warm_up``, and profiles ``profiled`` more.

    Args:
        contender: with a ``name``, and ``packed``.
        make: a folder, the number of updates and a callback -> the trainer.
        of_update: what an update has, and the unit of that per second.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        began = first = warm = ended = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                synchronize()
                self.first = time.perf_counter()
            if state.global_step in (warm_up, warm_up + updates):
                synchronize()
                self.warm, self.ended = self.ended, time.perf_counter()
            if profiled and state.global_step in (total - 1, total):
                profiles[state.global_step == total].__exit__(None, None, None)
            if profiled and state.global_step in (total - 2, total - 1):
                profiles[state.global_step == total - 1].__enter__()

    clock, total = Clock(), warm_up + updates + profiled
    profiles: tuple[Any, Any] = DeviceProfile(), HostProfile()
    amount, unit = of_update
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    try:
        with TemporaryDirectory() as folder:
            trainer = make(folder, total, clock)
            trainer.train()
            if contender.packed:
                print(contender.name, trainer.packed_step.parts, flush=True)
            if profiled:
                print(contender.name, *profiles, sep="\n", flush=True)
            loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
            trainer.accelerator.free_memory()
            del trainer
    except Exception as failure:
        yield failed(section, case, contender.name, unit, failure)
        return
    yield Result(section, case, contender.name, amount * updates / (clock.ended - clock.warm), unit)
    yield Result(section, case, contender.name, highest_gib(), "GiB at most")
    yield Result(section, case, contender.name, float(loss), "mean loss")
    yield Result(section, case, contender.name, clock.first - clock.began, "s to the first update")


def verdict(shape: str, results: Sequence[Result], unit: str = "pairs/s") -> str:
    """The fastest stock setting, and the fastest packed one within its memory."""
    figures: dict[str, dict[str, float]] = {}
    for result in results:
        if result.case == shape and result.value is not None:
            figures.setdefault(result.contender, {})[result.unit] = result.value
    stock = {name: found for name, found in figures.items() if name.startswith("stock")}
    packed = {name: found for name, found in figures.items() if not name.startswith("stock")}
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


def tokenizer() -> Any:
    """Builds the tokenizer that a trainer asks for; the pairs are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(4)}, unk_token="<3>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>", unk_token="<3>")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    options.add_argument("--updates", type=int, default=1 if TOY else 4, help="timed, after the warm-up")
    options.add_argument("--warm-up", type=int, default=WARM_UP, help="updates that are not timed")
    options.add_argument(
        "--lora", action="store_true", help="train adapters, whose reference is the model without them"
    )
    options.add_argument("--profile", action="store_true", help="two more updates, and what the host did in them")
    chosen = parsed(options, arguments)
    results = collected(_run(chosen), chosen.output)
    for case in dict.fromkeys(result.case for result in results):
        print(verdict(case, results), flush=True)
    return results


def _run(chosen: argparse.Namespace) -> Iterator[Result]:
    options = {"warm_up": chosen.warm_up, "lora": chosen.lora}
    for shape, contender in product(chosen.shape, contenders()):
        if wanted(contender.name) and seconds_left() > 0:
            figures = measure(contender, shape, chosen.updates, 2 * chosen.profile, **options)
            yield from survived(contender.name, figures)
            free()


if __name__ == "__main__":
    main()
