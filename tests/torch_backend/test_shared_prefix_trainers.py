"""enable_packing(trainer, share_prefix=...): an update of DPO, KTO, GRPO and RLOO is that of every document alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.preference import arguments, assert_same_training, model_of, text, tokenizer, trained
from tests.torch_backend.test_preference import divide
from tests.torch_backend.test_scored_trainers import LORA, rewards
from tests.torch_backend.test_scored_trainers import alone as policy_alone
from torch_backend import explain
from torch_backend.trainers.enable_packing import enable_packing

datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
trl = pytest.importorskip("trl", reason="the trainers are TRL's")
peft = pytest.importorskip("peft", reason="TRL applies adapters")

FAMILIES = ("qwen3", "gpt_oss", "qwen3_5_text")


def policy(name, path, family="qwen3", adapter=True, lora_dropout=0.0, **options):
    """Two prompts of 30 words a micro-batch, with four completions each."""
    rng = np.random.default_rng(0)
    defaults = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 20,
        "beta": 0.1,
        "temperature": 0.8,
    }
    return getattr(trl, f"{name}Trainer")(
        model_of(family),
        rewards,
        args=arguments(getattr(trl, f"{name}Config"), path, **{**defaults, **options}),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(rng, 30, 31)} for _ in range(8)]),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA, lora_dropout=lora_dropout) if adapter else None,
    )


def dpo(path, family="qwen3", answers=(2, 30), **options):
    """Pairs of two answers of so many words to a prompt of 70."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": text(rng, 70, 71), "chosen": f" {text(rng, *answers)} w2", "rejected": f" {text(rng, *answers)} w2"}
        for _ in range(6)
    ]
    return trl.DPOTrainer(
        model_of(family),
        model_of(family, seed=1),
        args=arguments(trl.DPOConfig, path, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def shared(trainer, share_prefix=True, least_saved=0.3):
    """Trains with shared prefixes; ``explain`` must say that they saved that part of the tokens at least."""
    found = trained(enable_packing(trainer, verify=False, share_prefix=share_prefix))
    prefixes = trainer.model_wrapped and trainer.packed_step.parts["shared prefixes"]
    assert f"shared prefixes of the step: {prefixes}" in str(explain(trainer))
    saved, given = (int(part.split()[0].replace(",", "")) for part in prefixes.split(" of "))
    assert saved >= least_saved * given > 0
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_an_update_of_a_policy_is_that_of_each_document_alone(tmp_path, name, family) -> None:
    assert_same_training(shared(policy(name, tmp_path, family)), policy_alone(policy(name, tmp_path, family)))


def test_a_policy_of_several_iterations_and_all_weights(tmp_path) -> None:
    options = {"adapter": False, "num_iterations": 2, "max_steps": 2, "beta": 0.0}
    assert_same_training(shared(policy("GRPO", tmp_path, **options)), policy_alone(policy("GRPO", tmp_path, **options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_dpo_is_that_of_each_document_alone(tmp_path, family) -> None:
    assert_same_training(shared(dpo(tmp_path, family)), trained(divide(dpo(tmp_path, family))))


def test_auto_shares_long_prompts_and_leaves_short_ones_and_other_models_alone(tmp_path) -> None:
    shared(dpo(tmp_path), "auto", least_saved=0.2)
    short = policy("GRPO", tmp_path)
    found = trained(enable_packing(short, verify=False, share_prefix="auto"))
    assert short.packed_step.parts["shared prefixes"].startswith("0 of ")
    assert_same_training(found, policy_alone(policy("GRPO", tmp_path)))


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("bloom", {}, "not shared: it runs on batches of documents"),
        ("qwen3", {"lora_dropout": 0.1}, "not shared: dropout .* is on, and documents that share a prefix"),
    ],
)
def test_auto_says_why_it_shares_nothing(tmp_path, family, options, reason) -> None:
    trainer = policy("GRPO", tmp_path, family, **options)
    trained(enable_packing(trainer, verify=False, share_prefix="auto"))
    assert re.match(reason, trainer.packed_step.parts["shared prefixes"])


def test_auto_declines_what_saves_little(tmp_path) -> None:
    trainer = dpo(tmp_path, answers=(400, 410))
    trained(enable_packing(trainer, verify=False, share_prefix="auto"))
    said = trainer.packed_step.parts["shared prefixes"]
    assert re.match(r"0 of .*calls that would save less than 10% of their work are left as they are, the last", said)


def test_what_would_not_be_exact_is_refused(tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM cannot run shared prefixes: it runs on batches"):
        trained(enable_packing(dpo(tmp_path, "bloom"), verify=False, share_prefix=True))
    dropping = policy("GRPO", tmp_path, lora_dropout=0.1)
    with pytest.raises(UnsupportedModelError, match="dropout .* is on, and documents that share a prefix"):
        trained(enable_packing(dropping, verify=False, share_prefix=True))
    with pytest.raises(PackingError, match="share_prefix is 'yes': pass True, False or \"auto\""):
        enable_packing(dpo(tmp_path), share_prefix="yes")


def test_other_trainers_name_what_shares_prefixes(tmp_path) -> None:
    rng = np.random.default_rng(0)
    trainer = trl.SFTTrainer(
        model_of("qwen3"),
        args=arguments(trl.SFTConfig, tmp_path),
        train_dataset=datasets.Dataset.from_list([{"text": text(rng, 2, 10)} for _ in range(4)]),
        processing_class=tokenizer(),
    )
    with pytest.raises(
        UnsupportedError, match="SFTTrainer shares no prefixes: TRL's DPO, KTO, GRPO and RLOO trainers do"
    ):
        enable_packing(trainer, share_prefix=True)
    enable_packing(trainer, share_prefix="auto", verify=False)
    assert "no prefix is shared: TRL's DPO, KTO, GRPO and RLOO trainers do so" in str(explain(trainer))
