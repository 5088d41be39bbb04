"""TRL's trainers of preferences, rewards and policies over tiny models, each by the folder that it writes to."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import transformers

from tests.torch_backend.hf.test_conditions import CHANGES
from tests.torch_backend.models import in_float64, tiny
from tests.torch_backend.preference import arguments, model_of, pairs, text, tokenizer
from torch_backend.auditing.tiny import tiny_model
from torch_backend.hf.anatomy.structure import causal_lm

datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
trl = pytest.importorskip("trl", reason="the trainers are TRL's")
peft = pytest.importorskip("peft", reason="TRL applies adapters")

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def dpo(path, family="qwen3", *, data=None, eval_dataset=None, ref_model=True, changes=None, **options):
    """A DPOTrainer whose reference is another model than the one that is trained."""
    adapter, precise = options.pop("peft_config", None), options.pop("float64", False)
    model = model_of(family, **(changes or {}))
    reference = model_of(family, seed=1, **(changes or {})) if ref_model else None
    for each in filter(None, (model, reference) if precise else ()):
        in_float64(each)
    return trl.DPOTrainer(
        model,
        reference,
        args=arguments(trl.DPOConfig, path, **options),
        train_dataset=pairs() if data is None else data,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        peft_config=adapter,
    )


def reward(path, family="qwen3", *, margins=False, count=4, adapter=None, **options):
    rng = np.random.default_rng(0)
    rows = [{"chosen": f"{text(rng, 4, 45)} w2", "rejected": f"{text(rng, 4, 45)} w2"} for _ in range(count)]
    rows = [{**row, **({"margin": 0.5 * i} if margins else {})} for i, row in enumerate(rows)]
    config = tiny(family, pad_token_id=0, **CHANGES.get(family, {})).config
    config.num_labels = 1
    return trl.RewardTrainer(
        tiny_model(config, transformers.AutoModelForSequenceClassification.from_config),
        args=arguments(trl.RewardConfig, path, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=adapter,
    )


def kto(path, family="qwen3", adapter=None, data=None, **options):
    rng = np.random.default_rng(0)
    rows = data or [
        {"prompt": text(rng, 2, 10), "completion": f" {text(rng, 2, 40)} w2", "label": bool(i % 2)} for i in range(9)
    ]
    defaults = {"per_device_train_batch_size": 3}
    return trl.KTOTrainer(
        model_of(family),
        model_of(family, seed=1) if adapter is None else None,
        args=arguments(trl.KTOConfig, path, **{**defaults, **options}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=adapter,
    )


def rewards(completion_ids, **_):
    """Differ among the completions of a prompt."""
    return [float(sum(ids) % 17) / 17 for ids in completion_ids]


def policy(name, path, family="qwen3", adapter=True, model=None, words=(2, 20), lora_dropout=0.0, **options):
    """A trainer of completions of 2 to 20 words, whose reference is the model without its adapter."""
    rng = np.random.default_rng(0)
    defaults = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 20,
        "beta": 0.1,
        "temperature": 0.8,
    }
    home = trl if hasattr(trl, f"{name}Trainer") else importlib.import_module(f"trl.experimental.{name.lower()}")
    return getattr(home, f"{name}Trainer")(
        model_of(family) if model is None else model,
        rewards,
        args=arguments(getattr(home, f"{name}Config"), path, **{**defaults, **options}),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(rng, *words)} for _ in range(8)]),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA, lora_dropout=lora_dropout) if adapter else None,
    )


def same_completions(model, of_a_prompt=4, cut=False, words=90) -> None:
    """Let a model complete a prompt in four ways that depend on the prompt alone, and not on rank or batch.

    The words are those below ``words``. With ``cut``, every third one has no end.
    """

    def generate(input_ids, **_):
        answers = torch.zeros(len(input_ids), 20, dtype=torch.int64)
        for number, prompt in enumerate(input_ids):
            rng = np.random.default_rng([int(prompt.sum()), number % of_a_prompt])
            said = rng.integers(4, words, 20 if cut and number % 3 == 0 else rng.integers(2, 20))
            answers[number, : len(said)] = torch.from_numpy(said)
            answers[number, len(said) :][:1] = 2
        return torch.cat((input_ids, answers), 1)

    causal_lm(model).generate = generate
