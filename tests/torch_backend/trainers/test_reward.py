"""enable_packing with RewardTrainer: one update is that of TRL's own loss with every answer in a forward of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import torch_backend
from tests.torch_backend.hf.test_conditions import CHANGES
from tests.torch_backend.models import tiny
from tests.torch_backend.preference import (
    ROUTES,
    arguments,
    assert_same_training,
    one_document_per_call,
    text,
    tokenizer,
    trained,
)
from torch_backend.auditing.tiny import tiny_model
from torch_backend.trainers.enable_packing import enable_packing

datasets = pytest.importorskip("datasets", reason="trainers take their data as datasets")
trl = pytest.importorskip("trl", reason="the trainers are TRL's")
peft = pytest.importorskip("peft", reason="TRL applies adapters")


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


def alone(trainer):
    one_document_per_call(trainer.model)
    return trained(trainer)


def packed(trainer):
    return trained(enable_packing(trainer, verify=False))


@pytest.mark.parametrize("family", ROUTES)
def test_an_update_is_that_of_each_answer_alone(tmp_path, family) -> None:
    assert_same_training(packed(reward(tmp_path, family)), alone(reward(tmp_path, family)))


def test_margins_and_centred_rewards_and_adapters(tmp_path) -> None:
    options = {"margins": True, "center_rewards_coefficient": 0.1}
    options["adapter"] = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear", init_lora_weights=False)
    assert_same_training(packed(reward(tmp_path, **options)), alone(reward(tmp_path, **options)))


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
