"""Updates of TRL's GRPOTrainer from recorded rollouts: as it is, and after enable_packing. Nothing is generated.

    python -m benchmarks.gpu_policy                      # 0.5B and 4B shapes, LoRA of rank 16, bfloat16
    python -m benchmarks.gpu_policy --shape 4B --row 65536
    python -m benchmarks.gpu_policy --rollouts FILE      # a line of JSON for each answer
    python -m benchmarks.gpu_policy --full --shape 0.5B  # all weights, and a reference model beside
    python -m benchmarks.gpu_policy --profile            # one more update: GPU busy, gaps, kernels
    python -m benchmarks.gpu_policy --tiny               # every contender on the CPU; its times mean nothing

A rollout is ``{"prompt_ids", "completion_ids", "logprobs", "reward"}``, the log-probabilities of its sampler; eight in
a row answer one prompt. Made-up prompts have 256 tokens in the mean, answers 768 (lognormal). An update is two
micro-batches of about ``--row`` tokens: log-probabilities of the old policy, which TRL compares with its sampler's,
those of the reference (the model without its adapters), then the policy's, with a backward. Tokens are counted without
padding, a prompt again for each answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.clock import TOY, header
from benchmarks.gpu_preference import SHAPES, Contender, add_options, trainer_run, verdict
from benchmarks.harness import measured, parsed, parser
from benchmarks.report import Result, collected
from benchmarks.shapes import config
from benchmarks.workload import random_model, tokenizer, trainer_options

SECTION = "policy" if not TOY else "policy, toy"
GROUP, MICRO_BATCHES, TOKENS = 8, 2, "tokens/s"
PROMPT, ANSWER, LONGEST, ROW = (12, 20, 64, 256) if TOY else (256, 768, 4_096, 16_384)


def contenders(row: int) -> list[Contender]:
    """Packed ones first; the stock trainer also with fewer answers, whose padding takes less memory."""
    most = row // (PROMPT + ANSWER) // GROUP * GROUP
    packed = [
        Contender(True, most, checkpointing, fast=fast) for fast in (True, False) for checkpointing in (True, False)
    ]
    return packed + [Contender(False, most // 2**i, True, "recorded") for i in range(2 if TOY else 4)]


def made_up(count: int) -> list[dict[str, Any]]:
    """Rollouts of random tokens; their log-probabilities are those of a sampler that agrees with random weights."""
    generator = np.random.default_rng(0)

    def tokens(mean: float) -> list[int]:
        length = int(np.clip(generator.lognormal(np.log(mean) - 0.18, 0.6), 4, LONGEST))
        return [*generator.integers(4, 190 if TOY else 100_000, length).tolist(), 2]

    pairs = ((prompt, tokens(ANSWER)) for _ in range(count // GROUP) for prompt in [tokens(PROMPT)] * GROUP)
    rollouts = [{"prompt_ids": prompt, "completion_ids": answer} for prompt, answer in pairs]
    chance = -float(np.log(199 if TOY else 151_936))
    return [
        {**ids, "logprobs": [chance] * len(ids["completion_ids"]), "reward": float(generator.normal())}
        for ids in rollouts
    ]


def build(
    contender: Contender,
    shape: str,
    rollouts: list[dict[str, Any]],
    full: bool,
    answers: int,
    folder: str,
    updates: int,
    callback: Any,
) -> Any:
    """A GRPOTrainer over random weights that takes its rollouts from a list, by ``rollout_func``.

    Args:
        full: train all weights.
        answers: of an update.
    """  # fmt: skip
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    model = random_model(config(SHAPES[shape]))
    if full:  # the trainer loads its reference from where the model came from
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    options = trainer_options(
        updates, per_device_train_batch_size=contender.micro, num_generations=GROUP, learning_rate=1e-6, beta=0.04,
        gradient_accumulation_steps=answers // contender.micro, gradient_checkpointing=contender.checkpointing,
        bf16=not TOY, logging_steps=updates, shuffle_dataset=False,
    )  # fmt: skip

    def recorded(prompts: list[str], _: Any) -> dict[str, list[Any]]:
        taken = [rollouts[int(prompt) * GROUP + place % GROUP] for place, prompt in enumerate(prompts)]
        return {name: [rollout[name] for rollout in taken] for name in taken[0]}

    trainer: Any = trl.GRPOTrainer(
        model, lambda reward, **_: reward, args=trl.GRPOConfig(folder, **options), processing_class=tokenizer(),
        callbacks=[callback],
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(rollouts) // GROUP)]),
        rollout_func=recorded,
        peft_config=None if full else LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    # As if vLLM had made them: the trainer compares its log-probabilities with theirs.
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


def run(chosen: Any) -> Iterator[Result]:
    updates, all_contenders = chosen.warm_up + chosen.updates + chosen.profile, contenders(chosen.row)
    answers = MICRO_BATCHES * all_contenders[0].micro  # of an update
    lines = chosen.rollouts.read_text().splitlines() if chosen.rollouts else ()
    rollouts = list(islice(cycle(map(json.loads, lines)), answers * updates)) or made_up(answers * updates)
    timed = rollouts[answers * chosen.warm_up :][: answers * chosen.updates]
    tokens = sum(len(x["prompt_ids"]) + len(x["completion_ids"]) for x in timed) / chosen.updates
    for shape in chosen.shape:
        case = f"{shape}, {'all weights' if chosen.full else 'LoRA'}, rows of {chosen.row:,}"
        for contender in all_contenders:
            make = partial(build, contender, shape, rollouts, chosen.full, answers)
            measure = partial(trainer_run, contender, make, (tokens, TOKENS), chosen)
            yield from measured(SECTION, case, contender.name, TOKENS, measure)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    add_options(options)
    options.add_argument("--row", type=int, default=ROW, help="tokens of a micro-batch, about")
    options.add_argument("--rollouts", type=Path, help="a file of them; again from its beginning where it ends")
    options.add_argument("--full", action="store_true", help="train all weights, beside a reference model")
    chosen = parsed(options, arguments)
    results = collected(run(chosen), header(), chosen.output, "gpu_policy")
    for case in dict.fromkeys(result.case for result in results):
        print(verdict(case, results, TOKENS), flush=True)
    return results


if __name__ == "__main__":
    main()
