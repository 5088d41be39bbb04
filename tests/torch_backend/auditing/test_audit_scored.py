"""audit(trainer) of preference and policy trainers: what TRL does, what packing does, and planted leaks."""

from __future__ import annotations

import copy

import pytest
import torch

import torch_backend
from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.preference import pairs
from tests.torch_backend.scored_trainers import dpo, kto, policy
from torch_backend.trainers.enable_packing import enable_packing

BUILD = {
    "DPO": dpo,
    "KTO": kto,
    "GRPO": lambda path, family, **options: policy("GRPO", path, family, **options),
    "RLOO": lambda path, family, **options: policy("RLOO", path, family, **options),
}


@pytest.mark.parametrize("name", BUILD)
def test_stock_trl_is_exact_on_a_dense_model_and_packed_as_well(tmp_path, name) -> None:
    trainer = BUILD[name](tmp_path, "qwen3")
    stock = torch_backend.audit(trainer)
    assert stock.verdict == "exact" and stock.rows == stock.documents > 2, str(stock)
    packed = torch_backend.audit(enable_packing(trainer, verify=False))
    assert packed.verdict == "exact" and packed.rows == 1, str(packed)
    assert packed.documents == stock.documents and packed.targets == stock.targets
    assert packed.leak == packed.noise == 0 and packed.moved > 0.1 and packed.gradients < 1e-5


def test_equal_answers_whose_gradients_cancel_are_no_contamination(tmp_path) -> None:
    data = pairs().map(lambda row: {"rejected": row["chosen"]})
    report = torch_backend.audit(enable_packing(dpo(tmp_path, data=data), verify=False))
    assert report.verdict == "exact" and report.leak == 0 and report.moved > 0.1, str(report)


def test_padding_contaminates_frequencies_that_depend_on_the_longest_answer(tmp_path) -> None:
    trainer = dpo(tmp_path, "phi3")
    stock = torch_backend.audit(trainer)
    assert stock.verdict == "contaminated" and stock.cosine < 0.999, str(stock)
    packed = torch_backend.audit(enable_packing(trainer, verify=False))
    assert packed.verdict == "exact", str(packed)


def test_the_trainer_is_as_it_was(tmp_path) -> None:
    trainer = enable_packing(policy("GRPO", tmp_path), verify=False)
    weights = copy.deepcopy(trainer.model.state_dict())
    attributes, metrics, random = dict(trainer.__dict__), copy.deepcopy(trainer._metrics), torch.get_rng_state()
    torch_backend.audit(trainer)
    assert trainer._metrics == metrics
    assert {k: v for k, v in trainer.__dict__.items() if k != "_metrics"} == {
        k: v for k, v in attributes.items() if k != "_metrics"
    }
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_completions_without_an_advantage_are_judged_by_others(tmp_path, name) -> None:
    trainer = policy(name, tmp_path, beta=0.0)
    trainer.reward_funcs = [lambda completions, **_: [1.0] * len(completions)]
    stock = torch_backend.audit(trainer)
    report = torch_backend.audit(enable_packing(trainer, verify=False))
    for each in (stock, report):
        assert each.verdict == "exact" and each.batches == 1 and each.gradients > 0, str(each)


def test_batches_are_taken_until_one_trains(tmp_path) -> None:
    trainer, calls = kto(tmp_path, per_device_train_batch_size=3), []
    stock = trainer._prepare_inputs

    def prepared(inputs):
        batch = stock(inputs)
        calls.append(batch)
        if len(calls) < 3 or trainer.nothing:
            batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
        return batch

    trainer._prepare_inputs, trainer.nothing = prepared, False
    report = torch_backend.audit(trainer)
    assert report.verdict == "exact" and report.batches == len(calls) == 3, str(report)
    trainer.nothing = True
    with pytest.raises(PackingError, match="nothing is trained in the first 3 batches of KTOTrainer, because every gr"):
        torch_backend.audit(trainer)


def test_a_document_alone_in_every_batch_is_said_to_be(tmp_path) -> None:
    trainer = kto(tmp_path, per_device_train_batch_size=1, loss_type="apo_zero_unpaired")
    report = torch_backend.audit(enable_packing(trainer, verify=False))
    assert report.verdict == "exact" and report.isolated and report.documents == 1, str(report)
    assert report.moved > 0.1


def test_rows_that_a_trainer_packs_itself_are_refused(tmp_path) -> None:
    trainer = dpo(tmp_path)
    stock = trainer.data_collator

    def numbered(features):
        batch = stock(features)
        return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}

    trainer.data_collator = numbered
    with pytest.raises(UnsupportedError, match="Qwen3ForCausalLM on rows that it has packed itself"):
        torch_backend.audit(trainer)
