"""enable_packing with KTOTrainer, GRPOTrainer and RLOOTrainer: updates are those of every document alone."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from tests.torch_backend.preference import (
    arguments,
    assert_same_training,
    model_of,
    one_document_per_call,
    text,
    tokenizer,
    trained,
)
from torch_backend import unpad
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.trainers.enable_packing import enable_packing

datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
trl = pytest.importorskip("trl", reason="the trainers are TRL's")
peft = pytest.importorskip("peft", reason="TRL applies adapters")

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def alone(trainer):
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            one_document_per_call(model)
    return trained(trainer)


def packed(trainer):
    return trained(enable_packing(trainer, verify=False))


# KTO


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


# DPO and rewards meet every way through a decoder; the other trainers call their models as those do.
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_alibi"])
def test_an_update_of_kto_is_that_of_each_document_alone(tmp_path, family) -> None:
    assert_same_training(packed(kto(tmp_path, family)), alone(kto(tmp_path, family)))


def test_examples_of_kto_weigh_the_same_in_every_micro_batch(tmp_path) -> None:
    """Nine examples: four of two and one alone are nine alone. Without the KL, a mean of each micro-batch."""
    options = {"loss_type": "apo_zero_unpaired", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 5}
    weights, _ = packed(kto(tmp_path, **options))
    truth, _ = alone(kto(tmp_path, **{**options, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 9}))
    assert_same_training((weights, []), (truth, []))


def test_a_reference_of_kto_computed_ahead_is_that_of_the_documents_alone(tmp_path) -> None:
    """TRL computes it, also for its mismatched answers, from padded batches, which phi3's frequencies depend on."""
    options = {"precompute_ref_log_probs": True}
    assert_same_training(packed(kto(tmp_path, "phi3", **options)), alone(kto(tmp_path, "phi3")))


def test_an_adapter_is_its_own_reference_in_kto(tmp_path) -> None:
    options = {"adapter": peft.LoraConfig(**LORA), "loss_type": "apo_zero_unpaired"}  # which has no KL
    assert_same_training(packed(kto(tmp_path, **options)), alone(kto(tmp_path, **options)))


# GRPO and RLOO


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


def same_completions(model, of_a_prompt=4, cut=False) -> None:
    """Let a model complete a prompt in four ways that depend on the prompt alone, and not on rank or batch.

    With ``cut``, every third one has no end.
    """

    def generate(input_ids, **_):
        answers = torch.zeros(len(input_ids), 20, dtype=torch.int64)
        for number, prompt in enumerate(input_ids):
            rng = np.random.default_rng([int(prompt.sum()), number % of_a_prompt])
            words = rng.integers(4, 90, 20 if cut and number % 3 == 0 else rng.integers(2, 20))
            answers[number, : len(words)] = torch.from_numpy(words)
            answers[number, len(words) :][:1] = 2
        return torch.cat((input_ids, answers), 1)

    causal_lm(model).generate = generate


@pytest.mark.parametrize(
    ("name", "family"), [("GRPO", "gpt_oss"), ("GRPO", "falcon_alibi"), ("RLOO", "qwen3_5_text"), ("RLOO", "phi3")]
)
def test_an_update_of_a_policy_is_that_of_each_document_alone(tmp_path, name, family) -> None:
    assert_same_training(packed(policy(name, tmp_path, family)), alone(policy(name, tmp_path, family)))


@pytest.mark.parametrize("options", [{}, {"mask_truncated_completions": True}, {"normalize_advantages": True}], ids=str)
def test_rloo_is_the_padded_trainer_over_two_iterations(tmp_path, options) -> None:
    ends = []
    for train in (packed, trained):
        trainer = policy("RLOO", tmp_path, num_iterations=2, max_steps=2, **options)
        same_completions(trainer.model, cut=True)
        ends.append(train(trainer))
    assert_same_training(*ends)
    assert 0 < ends[0][1][0]["completions/clipped_ratio"] < 1


def test_gmpo_is_grpo_with_another_formula(tmp_path) -> None:
    assert_same_training(packed(policy("GMPO", tmp_path, "phi3")), alone(policy("GMPO", tmp_path, "phi3")))


def test_grpo_with_a_reference_model_runs_it_packed_too(tmp_path) -> None:
    model_of("phi3").save_pretrained(tmp_path / "model")
    options = {"adapter": False, "model": str(tmp_path / "model")}
    assert_same_training(packed(policy("GRPO", tmp_path, **options)), alone(policy("GRPO", tmp_path, **options)))


# Trainers that are refused, because they read logits: their models may run without padding all the same.


def reads_logits(name, path, family):
    """A2PO compared with itself padded; online DPO, whose metrics TRL sums over padding too, with documents alone."""
    home = importlib.import_module({"A2PO": "trl.experimental.a2po", "OnlineDPO": "trl.experimental.online_dpo"}[name])
    rng = np.random.default_rng(0)
    sizes = {"max_new_tokens": 20, "max_length": 64}
    if name == "A2PO":
        sizes = {"max_completion_length": 20, "filter_all_incorrect": False}
    reference, words = {} if name == "A2PO" else {"ref_model": model_of(family, seed=1)}, tokenizer()
    words.padding_side = "left"
    return getattr(home, f"{name}Trainer")(
        model_of(family),
        reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
        args=arguments(getattr(home, f"{name}Config"), path, per_device_train_batch_size=4, **sizes),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(rng, 2, 20)} for _ in range(8)]),
        processing_class=words,
        **reference,
    )


@pytest.mark.parametrize(("name", "right"), [("A2PO", trained), ("OnlineDPO", alone)])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_trainers_that_read_logits_are_exact_with_unpadded_models(tmp_path, name, right, family) -> None:
    trainer = reads_logits(name, tmp_path, family)
    for model in (trainer.model, trainer.ref_model):
        unpad(model, verify=False)
    rows = []
    trainer.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    assert_same_training(trained(trainer), right(reads_logits(name, tmp_path, family)))
    assert rows == [1, 1]
