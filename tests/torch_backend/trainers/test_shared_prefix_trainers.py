"""enable_packing(trainer, share_prefix=...): an update by TRL's trainers is that of every document alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend import scored_trainers
from tests.torch_backend.preference import (
    alone,
    arguments,
    assert_same_training,
    model_of,
    packed,
    text,
    tokenizer,
    trained,
)
from tests.torch_backend.scored_trainers import datasets, trl
from torch_backend import PackedCollator, audit, explain
from torch_backend.hf import shared_rows
from torch_backend.hf.inputs import prefixes
from torch_backend.ops.attention import load
from torch_backend.steps.memory import draws_random_numbers
from torch_backend.trainers.enable_packing import enable_packing

FAMILIES = ("qwen3", "gpt_oss", "qwen3_5_text")


def policy(name, path, family="qwen3", **options):
    """Two prompts of 30 words a micro-batch, with four completions each."""
    return scored_trainers.policy(name, path, family, words=(30, 31), **{"per_device_train_batch_size": 8, **options})


def dpo(path, family="qwen3", answers=(2, 30), **options):
    """Pairs of two answers of so many words to a prompt of 70."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": text(rng, 70, 71), "chosen": f" {text(rng, *answers)} w2", "rejected": f" {text(rng, *answers)} w2"}
        for _ in range(6)
    ]
    return scored_trainers.dpo(path, family, data=datasets.Dataset.from_list(rows), **options)


def kto(path, **options):
    """Two answers of 5 to 30 words to each of two prompts of 70 in one micro-batch."""
    rng = np.random.default_rng(0)
    prompts = [text(rng, 70, 71) for _ in range(2)]
    rows = [{"prompt": prompts[i // 2], "completion": f" {text(rng, 5, 30)} w2", "label": i % 2 == 0} for i in range(4)]
    return scored_trainers.kto(path, data=rows, per_device_train_batch_size=4, **options)


def test_the_policy_and_its_reference_find_prefixes_once_on_the_host(tmp_path, monkeypatch):
    searched = []
    stock = shared_rows.shared_tokens
    monkeypatch.setattr(shared_rows, "shared_tokens", lambda *a, **k: searched.append(len(a[0])) or stock(*a, **k))
    monkeypatch.setattr(prefixes, "RowIds", None)  # what is read from the device
    trainer = enable_packing(dpo(tmp_path), verify=False)
    batches = []
    collate = trainer.data_collator
    monkeypatch.setattr(collate, "collator", lambda x, make=collate.collator: batches.append(make(x)) or batches[-1])
    trainer.train()
    tokens = [int(batch["attention_mask"].sum()) for batch in batches]  # the last one was fetched and not trained
    assert len(searched) > 1 and searched == tokens[: len(searched)]


def test_ids_that_changed_after_the_collator_are_refused(tmp_path):
    trainer = enable_packing(dpo(tmp_path), verify=False)
    stock = trainer.training_step

    def step(model, inputs, *rest):
        return stock(model, {**inputs, "input_ids": inputs["input_ids"].clamp(max=5)}, *rest)

    trainer.training_step = step
    with pytest.raises(
        LayoutError, match=r"token \d+ of a call is not that of its data collator, .* change token ids in"
    ):
        trainer.train()


def test_an_audit_exchanges_documents_whose_prefixes_the_collator_found(tmp_path):
    report = audit(enable_packing(dpo(tmp_path), verify=False))
    assert report.verdict == "exact", str(report)


def shared(trainer, least_saved=0.3, **options):
    """Trains with shared prefixes; ``explain`` must say that they saved that part of the tokens at least."""
    found = packed(trainer, **options)
    prefixes = trainer.model_wrapped and trainer.packed_step.parts["shared prefixes"]
    assert f"shared prefixes of the step: {prefixes}" in str(explain(trainer))
    saved, given = (int(part.split()[0].replace(",", "")) for part in prefixes.split(" of "))
    assert saved >= least_saved * given > 0
    return found


@pytest.mark.parametrize(("name", "family"), [("GRPO", "gpt_oss"), ("RLOO", "qwen3_5_text")])
def test_an_update_of_a_policy_is_that_of_each_document_alone(tmp_path, name, family) -> None:
    found = shared(policy(name, tmp_path, family), share_prefix=True)
    assert_same_training(found, alone(policy(name, tmp_path, family)))


def test_an_update_of_gmpo_is_that_of_each_document_alone(tmp_path) -> None:
    pytest.importorskip("trl.experimental.gmpo", reason="TRL 1.16 and newer have it")
    options = {"num_iterations": 2, "max_steps": 2}
    found = shared(policy("GMPO", tmp_path, **options), share_prefix=True)
    assert_same_training(found, alone(policy("GMPO", tmp_path, **options)))


def test_an_update_of_kto_whose_answers_have_one_prompt_is_that_of_each_document_alone(tmp_path) -> None:
    assert_same_training(shared(kto(tmp_path), share_prefix=True), alone(kto(tmp_path)))


def test_a_policy_of_several_iterations_and_all_weights(tmp_path) -> None:
    options = {"adapter": False, "num_iterations": 2, "max_steps": 2, "beta": 0.0}
    found = shared(policy("GRPO", tmp_path, **options), share_prefix=True)
    assert_same_training(found, alone(policy("GRPO", tmp_path, **options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_dpo_is_that_of_each_document_alone(tmp_path, family) -> None:
    assert_same_training(shared(dpo(tmp_path, family), share_prefix=True), alone(dpo(tmp_path, family)))


def test_long_prompts_are_shared_by_default_and_short_ones_are_not(tmp_path) -> None:
    shared(dpo(tmp_path), least_saved=0.2)
    short = policy("GRPO", tmp_path)
    found = packed(short)
    assert short.packed_step.parts["shared prefixes"].startswith("0 of ")
    assert_same_training(found, alone(policy("GRPO", tmp_path)))


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("falcon_alibi", {}, "it runs on batches"),
        ("qwen3", {"lora_dropout": 0.1}, "dropout .* on.*, and documents that share a prefix"),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}, "its router's auxiliary loss would count a shared token once"),
    ],
)
def test_what_would_not_be_exact_is_left_out_by_auto_and_refused_on_demand(tmp_path, family, options, reason) -> None:
    trainer = policy("GRPO", tmp_path, family, **options)
    packed(trainer)
    assert re.match(f"not shared: {reason}", trainer.packed_step.parts["shared prefixes"])
    with pytest.raises(UnsupportedModelError, match=f"cannot run shared prefixes: {reason}"):
        enable_packing(policy("GRPO", tmp_path, family, **options), share_prefix=True)


def test_the_noise_of_neftune_is_that_of_each_answer_and_is_not_shared(tmp_path) -> None:
    trainer = enable_packing(dpo(tmp_path, neftune_noise_alpha=5), verify=False)
    embedding, seen, draws = trainer.model.get_input_embeddings(), [], []
    weights = embedding.weight.detach().clone()
    trainer.model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    embedding.register_forward_hook(lambda *_: draws.append(draws_random_numbers(trainer.model)))
    batches, collate = [], trainer.data_collator
    trainer.data_collator = lambda rows: batches.append(collate(rows)) or batches[-1]
    trained(trainer)
    assert draws and not any(draws)  # no layer does, so all may recompute
    ids, mask = batches[0]["input_ids"], batches[0]["attention_mask"] != 0
    noise = (seen[0][0] - weights[ids[mask]]).abs().split(mask.sum(1).tolist())
    assert len({len(answer) for answer in noise}) > 2
    for answer in noise:
        largest = 5 / (len(answer) * weights.shape[1]) ** 0.5
        assert 0.9 * largest < float(answer.max()) <= largest * 1.0001
    assert "noise (of embeddings, neftune_noise_alpha=5) is on" in trainer.packed_step.parts["shared prefixes"]


def test_auto_declines_what_saves_little(tmp_path) -> None:
    trainer = dpo(tmp_path, answers=(400, 410))
    packed(trainer)
    said = trainer.packed_step.parts["shared prefixes"]
    assert re.match(r"0 of .*calls that would save less than 10% of their work are left as they are, the last", said)


def test_attention_without_shared_prefixes_is_used_as_it_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(type(load("sdpa")), "parents", False)
    trainer = enable_packing(dpo(tmp_path), verify=False, implementation="sdpa")
    trained(trainer)
    reason = "attention by sdpa has no segments that continue others"
    assert trainer.packed_step.parts["shared prefixes"] == f"not shared: {reason}"
    assert PackedCollator(trainer.model, share_prefix="auto").share_prefix is False
    with pytest.raises(UnsupportedModelError, match=f"cannot run shared prefixes: {reason}"):
        enable_packing(dpo(tmp_path), implementation="sdpa", share_prefix=True)


def test_false_shares_nothing_and_other_values_are_refused(tmp_path) -> None:
    trainer = enable_packing(dpo(tmp_path), verify=False, share_prefix=False)
    trained(trainer)
    assert "shared prefixes" not in trainer.packed_step.parts
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
        UnsupportedError, match="SFTTrainer shares no prefixes: TRL's DPO, KTO, GRPO, GMPO and RLOO trainers do"
    ):
        enable_packing(trainer, share_prefix=True)
    enable_packing(trainer, share_prefix="auto", verify=False)
    assert "no prefix is shared: TRL's DPO, KTO, GRPO, GMPO and RLOO trainers do so" in str(explain(trainer))
