"""enable_packing with DPOTrainer: one update is that of TRL's own loss with every document in a forward of its own."""

from __future__ import annotations

import pytest
import torch

from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.models import in_float64
from tests.torch_backend.preference import (
    ROUTES,
    arguments,
    assert_same_training,
    model_of,
    one_document_per_call,
    pairs,
    tokenizer,
    trained,
)
from torch_backend.hf import experts as packed_experts
from torch_backend.steps.dynamic_compile import CompiledCalls
from torch_backend.trainers.enable_packing import enable_packing

trl = pytest.importorskip("trl", reason="the trainers are TRL's")
peft = pytest.importorskip("peft", reason="TRL applies adapters")


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


def divide(trainer):
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            one_document_per_call(model)
    return trainer


def alone(trainer):
    return trained(divide(trainer))


def packed(trainer):
    return trained(enable_packing(trainer, verify=False))


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
    assert_same_training(packed(dpo(tmp_path, **options)), alone(dpo(tmp_path, **options)))


def test_an_adapter_is_its_own_reference(tmp_path) -> None:
    options = {"ref_model": False, "peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])}
    assert_same_training(packed(dpo(tmp_path, **options)), alone(dpo(tmp_path, **options)))


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
