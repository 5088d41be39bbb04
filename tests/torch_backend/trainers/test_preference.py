"""enable_packing with TRL's trainers of preferences, rewards and policies: updates are those of the documents alone."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import torch_backend
from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.models import in_float64
from tests.torch_backend.preference import (
    ROUTES,
    alone,
    arguments,
    assert_packed_is_alone,
    assert_same_training,
    divide,
    model_of,
    packed,
    pairs,
    text,
    tokenizer,
    trained,
)
from tests.torch_backend.scored_trainers import (
    datasets,
    dpo,
    kto,
    peft,
    policy,
    reward,
    same_completions,
)
from torch_backend import unpad
from torch_backend.hf import experts as packed_experts
from torch_backend.steps.dynamic_compile import CompiledCalls
from torch_backend.trainers.enable_packing import enable_packing


@pytest.mark.parametrize("family", ROUTES)
def test_an_update_is_that_of_each_document_alone(tmp_path, family) -> None:
    """In float64: in float32 the hybrid's own rounding, packed or not, is as large as what is allowed."""
    exact = [dpo(tmp_path, family, float64=True) for _ in range(2)]
    assert_same_training(packed(exact[0]), alone(exact[1]))


EXPERTS = {
    "full": {},
    "adapters": {
        "ref_model": False,
        "peft_config": peft.LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        ),
    },
}


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "adapters"), ("gpt_oss", "full")])
def test_an_update_over_experts_is_that_of_each_document_alone(tmp_path, family, kind, monkeypatch) -> None:
    """Our kernels run the policy and its reference, and adapters reach them as they are."""
    exact = [dpo(tmp_path, family, **EXPERTS[kind], max_steps=2) for _ in range(2)]
    for trainer in exact:
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                in_float64(model)
    truth, ranks = alone(exact[1]), []
    original = packed_experts.experts

    def spy(*args, up_adapter=None, **options):
        ranks.append(0 if up_adapter is None else up_adapter.a.shape[1])
        return original(*args, up_adapter=up_adapter, **options)

    monkeypatch.setattr(packed_experts, "experts", spy)
    found = packed(exact[0])
    assert any("experts" in name and name.startswith("gradient") for name in found[0])
    assert_same_training(found, truth)
    layers = exact[0].model.config.num_hidden_layers
    forward = [2] * layers + [0] * layers if kind == "adapters" else [0] * 2 * layers  # the policy, its reference
    assert ranks == forward * 4, "two micro-batches in each of two steps"


LOSSES = [
    {"loss_type": ["sigmoid", "hinge", "ipo", "robust"], "label_smoothing": 0.1},
    {"loss_type": ["exo_pair", "nca_pair", "bco_pair", "sppo_hard"], "label_smoothing": 0.1},
    {"loss_type": ["aot", "aot_unpaired", "apo_zero", "apo_down"]},
    {"loss_type": ["discopop", "sft", "sigmoid_norm"], "f_divergence_type": "js_divergence", "ld_alpha": 0.5},
    {"loss_type": ["sigmoid"], "use_weighting": True},
]


@pytest.mark.parametrize("options", LOSSES, ids=lambda options: "-".join(options["loss_type"]))
def test_every_loss_type_is_that_of_the_documents_alone(tmp_path, options) -> None:
    assert_packed_is_alone(dpo, tmp_path, **options)


def test_pairs_weigh_the_same_in_every_micro_batch(tmp_path) -> None:
    """Five pairs: | 0 1 | 2 3 | 4 | is the step | 0 | 1 | 2 | 3 | 4 |, which TRL's mean of means is not."""
    data = pairs(5)
    split = {"data": data, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    single = {**split, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 5}
    weights, logs = packed(dpo(tmp_path, **split))
    truth, true_logs = alone(dpo(tmp_path, **single))
    kept = [{name: log[name] for name in log.keys() & {"loss", "train_loss", "grad_norm"}} for log in logs]
    wanted = [{name: log[name] for name in log.keys() & {"loss", "train_loss", "grad_norm"}} for log in true_logs]
    assert_same_training((weights, kept), (truth, wanted))


@pytest.mark.parametrize("precomputed", [False, True])
def test_training_and_evaluation_are_those_of_each_document_alone(tmp_path, precomputed) -> None:
    """TRL computes references from padded batches, which give phi3's short documents the frequencies of long ones."""
    evaluation = {"a": pairs(3, seed=3), "b": pairs(2, seed=4)}
    ours = dpo(tmp_path, "phi3", eval_dataset=evaluation, precompute_ref_log_probs=precomputed)
    theirs = divide(dpo(tmp_path, "phi3", eval_dataset=evaluation))
    before = ours.eval_dataset["a"]["ref_chosen_logps"] if precomputed else None
    enable_packing(ours, verify=False)
    assert not precomputed or ours.eval_dataset["a"]["ref_chosen_logps"] != before
    found, truth = ours.evaluate(), theirs.evaluate()
    for name in truth:
        if not any(word in name for word in ("time", "per_second")):
            assert found[name] == pytest.approx(truth[name], rel=1e-4), name
    assert_same_training(trained(ours), trained(theirs))


def test_generation_is_stock(tmp_path) -> None:
    trainer = dpo(tmp_path, "phi3")
    prompts = {"input_ids": torch.arange(4, 20).view(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    prompts["attention_mask"][1, :3] = 0  # padded before, as prompts are
    before = trainer.model.generate(**prompts, max_new_tokens=30, do_sample=False)
    enable_packing(trainer, verify=False)
    assert torch.equal(trainer.model.generate(**prompts, max_new_tokens=30, do_sample=False), before)


@pytest.mark.parametrize("option", [{"capacity": 64}, {"overflow": "split"}])
def test_options_of_rows_have_no_effect(tmp_path, option) -> None:
    with pytest.raises(PackingError, match="DPOTrainer puts the documents of each micro-batch into one row"):
        enable_packing(dpo(tmp_path), verify=False, **option)


def test_virtual_tokens_are_refused_before_training(tmp_path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trainer = dpo(tmp_path, ref_model=False, peft_config=config)
    with pytest.raises(UnsupportedError, match="virtual tokens every document of a row would need: use LoRA"):
        enable_packing(trainer, verify=False)
    assert trainer.model.get_base_model().config._attn_implementation == "sdpa"


def test_a_trl_without_its_fused_head_is_refused(tmp_path, monkeypatch) -> None:
    trainer = dpo(tmp_path)
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head")
    with pytest.raises(UnsupportedError, match="DPOTrainer of this TRL .* install trl 1.16 or newer"):
        enable_packing(trainer, verify=False)


def test_a_reference_that_is_refused_leaves_both_models_as_they_were(tmp_path) -> None:
    trainer = dpo(tmp_path)
    trainer.ref_model = torch.nn.Linear(2, 2)
    with pytest.raises(PackingError, match="no transformers model in Linear"):
        enable_packing(trainer, verify=False)
    assert trainer.model.config._attn_implementation == "sdpa"


def test_the_options_of_the_last_call_hold(tmp_path) -> None:
    trainer = enable_packing(enable_packing(dpo(tmp_path), verify=False), verify=False, fast=False, share_prefix=False)
    assert trainer.packed_step.parts["layers"] == "not compiled: fast=False"
    hooks = trainer.model._forward_hooks.values()
    assert not [hook for hook in hooks if isinstance(getattr(hook, "__self__", None), CompiledCalls)]
    assert trainer.data_collator.ids is False


@pytest.mark.parametrize("make", [dpo, kto, reward])
def test_batches_of_a_collator_that_is_set_afterwards_run_packed(tmp_path, make) -> None:
    trainer = make(tmp_path, "phi3")
    collator = trainer.data_collator
    enable_packing(trainer, verify=False).data_collator = collator
    assert_same_training(trained(trainer), alone(make(tmp_path, "phi3")))


# Rewards.


@pytest.mark.parametrize("family", ROUTES)
def test_an_update_of_rewards_is_that_of_each_answer_alone(tmp_path, family) -> None:
    assert_packed_is_alone(reward, tmp_path, family)


def test_margins_and_centred_rewards_and_adapters(tmp_path) -> None:
    options = {"margins": True, "center_rewards_coefficient": 0.1}
    options["adapter"] = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear", init_lora_weights=False)
    assert_packed_is_alone(reward, tmp_path, **options)


def test_pairs_weigh_the_same_in_every_micro_batch_and_in_evaluation(tmp_path) -> None:
    split = {"count": 5, "gradient_accumulation_steps": 3}
    single = {"count": 5, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 5}
    ours, theirs = reward(tmp_path, "phi3", **split), reward(tmp_path, "phi3", **single)
    assert_same_training((packed(ours)[0], []), (alone(theirs)[0], []))
    found, truth = (trainer.evaluate(ours.train_dataset) for trainer in (ours, theirs))
    for name in truth:
        if not any(word in name for word in ("time", "per_second")):
            assert found[name] == pytest.approx(truth[name], rel=1e-4), name


def test_audit_finds_what_padding_contaminates_and_packing_does_not(tmp_path) -> None:
    trainer = reward(tmp_path, "phi3")
    assert torch_backend.audit(trainer).verdict == "contaminated"
    report = torch_backend.audit(enable_packing(trainer, verify=False))
    assert report.verdict == "exact" and (report.documents, report.rows, report.leak) == (4, 1, 0), str(report)
    assert torch_backend.audit(reward(tmp_path, "qwen3")).verdict == "exact"


def test_scores_of_a_model_in_use_are_stock(tmp_path) -> None:
    trainer = reward(tmp_path)
    batch = {"input_ids": torch.arange(4, 24).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    before = trainer.model(**batch).logits
    enable_packing(trainer, verify=False)
    assert torch.equal(trainer.model(**batch).logits, before)


# KTO.


# DPO and rewards meet every way through a decoder; the other trainers call their models as those do.
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_alibi"])
def test_an_update_of_kto_is_that_of_each_document_alone(tmp_path, family) -> None:
    assert_packed_is_alone(kto, tmp_path, family)


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


# GRPO, RLOO and GMPO.


@pytest.mark.parametrize(
    ("name", "family"), [("GRPO", "gpt_oss"), ("GRPO", "falcon_alibi"), ("RLOO", "qwen3_5_text"), ("RLOO", "phi3")]
)
def test_an_update_of_a_policy_is_that_of_each_document_alone(tmp_path, name, family) -> None:
    assert_packed_is_alone(policy, name, tmp_path, family)


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
    assert_packed_is_alone(policy, "GMPO", tmp_path, "phi3")


def test_grpo_with_a_reference_model_runs_it_packed_too(tmp_path) -> None:
    model_of("phi3").save_pretrained(tmp_path / "model")
    options = {"adapter": False, "model": str(tmp_path / "model")}
    assert_packed_is_alone(policy, "GRPO", tmp_path, **options)


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
