"""Options of the torch trainer: bfloat16 weights, float32 copies of them, adapters, evaluation."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from packing_core.planning.plan import plan
from packing_core.training.job import TrainJob
from packing_core.training.options import Options
from packing_core.training.schedule import Schedule
from tests.training_jobs import LLAMA, begun_and_resumed, losses, small_job, with_options
from torch_backend.job.models import build_model, with_adapters
from torch_backend.job.ranks import Ranks
from torch_backend.job.states import MasterWeights, make_optimizer
from torch_backend.job.train import memory_line, states_bytes, train

LAYER = {**LLAMA, "num_hidden_layers": 1}
HALF = {"precision": "bfloat16", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with weights, which no test writes into."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    build_model(small_job(LAYER)).save_pretrained(folder)
    return folder


@pytest.fixture
def job(folder) -> TrainJob:
    return small_job(str(folder))


@pytest.fixture(scope="module")
def plain(folder) -> list[float]:
    """The losses of the job as it is."""
    return losses(train(small_job(str(folder))))


def with_evaluation(job: TrainJob) -> TrainJob:
    corpus = job.schedule.corpus
    held_out = Schedule(corpus, (plan(corpus.documents.lengths, 48, seed=9),), rows_per_step=3)
    return dataclasses.replace(job, evaluation=held_out, eval_every=4)


def loss_of_documents(model, schedule: Schedule) -> float:
    """Each document in a forward of its own; the mean over all targets, in float64."""
    total, count = 0.0, 0
    for ids, trained in zip(schedule.corpus.documents, schedule.corpus.trained, strict=True):
        ids, trained = torch.from_numpy(ids.copy()).long(), torch.from_numpy(trained.copy())
        with torch.no_grad():
            logits = model.eval()(input_ids=ids[None]).logits[0].double()
        chosen = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        total, count = total - chosen[trained[1:]].sum().item(), count + int(trained[1:].sum())
    return total / count


def norm_of_gradients(model, schedule: Schedule, step: int = 0) -> float:
    """Returns the norm for the mean loss over a step's targets, each document in a forward of its own."""
    plan, corpus = schedule.steps[step], schedule.corpus
    model.zero_grad()
    for number in plan.source.tolist():
        ids, trained = (torch.from_numpy(x[number].copy()) for x in (corpus.documents, corpus.trained))
        labels = ids.long().where(trained, torch.tensor(-100))
        if (labels[1:] != -100).any():
            logits = model.eval()(input_ids=ids.long()[None]).logits[0]
            torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum").backward()
    norms = [parameter.grad.double().norm() for parameter in model.parameters()]
    return float(torch.stack(norms).norm()) / schedule.trained_tokens[step]


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_the_norm_of_the_gradients_is_recorded_before_it_is_clipped(job, clip):
    job = dataclasses.replace(with_options(job, clip=clip), schedule=dataclasses.replace(job.schedule, limit=1))
    wanted = norm_of_gradients(AutoModelForCausalLM.from_pretrained(job.model), job.schedule)
    for records in train(dataclasses.replace(job, runs=("padded", "packed"))).records.values():
        assert records[0].grad_norm == pytest.approx(wanted, rel=1e-5)


def test_bfloat16_weights_are_trained_and_written_as_such(job, plain, tmp_path):
    result = train(dataclasses.replace(with_options(job, **HALF), output=tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert losses(result) != plain
    np.testing.assert_allclose(losses(result), plain, rtol=2e-2)


@pytest.mark.parametrize("master", [True, False])
def test_updates_that_bfloat16_rounds_away_add_up_in_float32_copies_alone(master):
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    truth = torch.nn.Parameter(torch.ones(4, 4))
    kind = MasterWeights if master else torch.optim.AdamW
    optimizer = kind([{"params": [weight]}], lr=1e-3, weight_decay=0.1)
    reference = torch.optim.AdamW([truth], lr=1e-3, weight_decay=0.1)
    for seed in range(20):
        gradient = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        weight.grad, truth.grad = gradient, gradient.float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        assert weight.grad is None
    assert torch.equal(weight.detach(), truth.detach().bfloat16()) == master
    assert torch.equal(weight.detach(), torch.ones(4, 4).bfloat16()) != master


@pytest.mark.parametrize("options", [{**HALF, "master_weights": True}, {"lora": 2}], ids=["master weights", "LoRA"])
def test_a_resumed_run_repeats_to_the_bit(job, options, tmp_path):
    job = with_evaluation(with_options(job, **options))
    expected = train(dataclasses.replace(job, output=tmp_path / "whole"))
    parts = dataclasses.replace(job, output=tmp_path / "parts", save_every=2)
    resumed = begun_and_resumed(train, parts, step=4)
    assert losses(resumed) == losses(expected)
    assert [r.eval_loss for r in resumed.records["packed"]] == [r.eval_loss for r in expected.records["packed"]]
    name = "adapter_model.safetensors" if "lora" in options else "model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_adapters_are_trained_alone_and_written_for_peft(job, folder, plain, tmp_path):
    from peft import AutoPeftModelForCausalLM

    before = (folder / "model.safetensors").read_bytes()
    adapters = with_evaluation(with_options(job, lora=2))
    result = train(dataclasses.replace(adapters, output=tmp_path / "out", save_every=6))
    assert losses(result)[0] == pytest.approx(plain[0], rel=1e-6)  # adapters begin as zero
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (folder / "model.safetensors").read_bytes() == before
    (saved,) = (tmp_path / "out").glob("checkpoints/*/model.safetensors")
    assert load_file(saved) and all("lora_" in name for name in load_file(saved)), "no other weights"
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert adapted.peft_config["default"].r == 2
    found = result.records["packed"][-1].eval_loss
    assert found == pytest.approx(loss_of_documents(adapted, job.schedule), rel=1e-5)
    assert found < loss_of_documents(AutoModelForCausalLM.from_pretrained(folder), job.schedule) - 1e-3


def test_an_evaluation_is_the_mean_over_all_targets_of_each_document_alone(job, plain, tmp_path):
    evaluated = dataclasses.replace(with_evaluation(job), output=tmp_path)
    result = train(evaluated)
    found = [record.eval_loss for record in result.records["packed"]]
    assert [loss is not None for loss in found] == [False, False, False, True, False, True]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found[-1] == pytest.approx(loss_of_documents(model, evaluated.evaluation), rel=1e-6)
    assert losses(result) == plain  # evaluating changes no step
    noisy = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.5}
    evaluated = dataclasses.replace(evaluated, model=noisy, output=tmp_path / "noisy")
    found = train(evaluated).records["packed"][-1].eval_loss  # without dropout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "noisy")
    assert found == pytest.approx(loss_of_documents(model, evaluated.evaluation), rel=1e-6)


@pytest.mark.parametrize("options", [{}, HALF, {**HALF, "master_weights": True}, {"lora": 2}], ids=str)
def test_the_memory_that_is_announced_is_that_of_the_tensors(job, options):
    job, lines = with_options(job, **options), []
    model = build_model(job)
    if job.options.lora:
        model = with_adapters(model, Options(lora=2))
    optimizer = make_optimizer(model, job.options, master_weights=job.options.master_weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in trained]
    optimizer.step()
    moments = [x for values in optimizer.state_dict()["state"].values() for x in values.values() if x.ndim]
    held = [*model.parameters(), *gradients, *moments]
    assert sum(states_bytes(model, job)) == sum(tensor.numel() * tensor.element_size() for tensor in held)
    train(dataclasses.replace(job, on_phase=lines.append))
    assert any(line.startswith("memory: 0.00 GiB of weights, gradients and optimizer states") for line in lines)


SHARES = {"ddp": (1, 1), "fsdp": (4, 4), "zero2": (1, 4), "zero3": (4, 4)}  # by how many weights and others are divided


def test_each_of_several_ranks_announces_its_share_of_what_the_strategy_divides(job):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=2_048, num_hidden_layers=2, intermediate_size=8_192))
    weights = 4 * sum(parameter.numel() for parameter in model.parameters()) / 2**30
    for strategy, (of_weights, of_others) in SHARES.items():
        line = memory_line(model, dataclasses.replace(job, strategy=strategy), Ranks(world=4), torch.device("cpu"))
        states = weights / of_weights + 3 * weights / of_others  # gradients and two moments
        assert line.startswith(f"memory: {states:.2f} GiB of weights, gradients and optimizer states"), strategy
        assert re.search(r"and about \d+\.\d\d GiB of activations", line)
