"""Runs that keep their best step, end early, try prompts, and train by other optimizers and with noise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from packing_core.errors import PackingError
from packing_core.planning.plan import plan
from packing_core.training.checkpoints import remove_older
from packing_core.training.job import TrainJob
from packing_core.training.records import StepRecord, best_record, without_progress
from packing_core.training.schedule import Schedule
from tests.training_jobs import LLAMA, begun_and_resumed, losses, small_job, with_options
from torch_backend.job.train import train

LAYER = {**LLAMA, "num_hidden_layers": 1}


@pytest.fixture
def job(tmp_path) -> TrainJob:
    job = small_job(LAYER, output=tmp_path / "run", eval_every=1)
    corpus = job.schedule.corpus
    return dataclasses.replace(job, evaluation=Schedule(corpus, (plan(corpus.documents.lengths, 48, seed=9),)))


def records(*losses: float | None) -> list[StepRecord]:
    return [StepRecord("packed", step, 1.0, 1, 1, 1.0, loss) for step, loss in enumerate(losses)]


def folders(job: TrainJob) -> list[str]:
    return sorted(folder.name for folder in (job.output / "checkpoints").iterdir())


def test_the_best_step_is_the_first_with_the_lowest_evaluation_loss():
    some = records(None, 3.0, None, 2.0, 2.0, 2.5)
    assert best_record(some) is some[3] and without_progress(some) == 2
    assert best_record(records(None)) is None and without_progress(records(None, None)) == 0


def rising(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Evaluations return these losses, one after the other."""
    from torch_backend.job.trainer import JobTrainer

    given = iter(values)
    monkeypatch.setattr(JobTrainer, "evaluation_loss", lambda self: next(given))


def test_the_weights_of_the_best_step_are_written_and_the_run_ends_early(job, monkeypatch, tmp_path):
    rising(monkeypatch, 3.0, 2.0, 2.5, 2.6, 0.1, 0.1)
    said: list[str] = []
    job = dataclasses.replace(job, keep_best=True, early_stopping=2, save_every=1, on_phase=said.append)
    result = train(dataclasses.replace(job, keep_checkpoints=2))
    assert [record.eval_loss for record in result.records["packed"]] == [3.0, 2.0, 2.5, 2.6]
    assert "no lower evaluation loss in 2 evaluations: the run ends here" in said
    assert folders(job) == ["step-00000002", "step-00000003", "step-00000004"]  # the best one and the last two
    kept = load_file(job.output / "checkpoints" / "step-00000002" / "model.safetensors")
    last = load_file(job.output / "checkpoints" / "step-00000004" / "model.safetensors")
    written = load_file(job.output / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(written[name], kept[name]) and not torch.equal(written[name], last[name])
    again = train(dataclasses.replace(job, resume=True))  # it has ended
    assert len(again.records["packed"]) == 4
    remove_older(job.output / "checkpoints", 2)
    assert folders(job) == ["step-00000003", "step-00000004"]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adafactor", "sgd", "rmsprop"])
def test_a_run_by_any_of_the_optimizers_goes_on_to_the_bit(job, optim):
    job = with_options(job, optim=optim, lr=1e-3, settings={"adam_beta2": 0.9})
    expected = train(dataclasses.replace(job, output=None))
    assert losses(begun_and_resumed(train, dataclasses.replace(job, save_every=2), step=3)) == losses(expected)


def test_a_named_optimizer_and_its_arguments_take_the_steps_that_torch_takes(job):
    """One step of SGD: the weights move by the rate times the clipped gradients."""
    job = with_options(job, optim="sgd", lr=0.1, warmup=0.0, decay="constant")
    job = dataclasses.replace(job, schedule=dataclasses.replace(job.schedule, limit=1), evaluation=None)
    done = train(dataclasses.replace(with_options(job, lr=0.0), output=job.output.with_name("start")))
    start = load_file(job.output.with_name("start") / "model.safetensors")
    train(job)
    moved = load_file(job.output / "model.safetensors")
    norm = sum((moved[name] - start[name]).double().norm() ** 2 for name in start) ** 0.5
    with pytest.raises(PackingError, match="--optim adamw_8bit: .*bitsandbytes"):  # which is missing
        train(with_options(job, optim="adamw_8bit"))
    assert norm.item() == pytest.approx(0.1 * min(1.0, done.records["packed"][0].grad_norm), rel=1e-4)


def test_noise_on_embeddings_is_added_in_training_and_not_in_evaluation(job):
    job = dataclasses.replace(with_options(job, lr=0.0), output=None)
    job = dataclasses.replace(job, schedule=dataclasses.replace(job.schedule, limit=1))
    plain, noisy = train(job), train(with_options(job, neftune_alpha=50.0))
    assert losses(noisy) != losses(plain)
    assert noisy.records["packed"][0].eval_loss == plain.records["packed"][0].eval_loss


def test_prompts_are_continued_as_generate_does_after_evaluations_and_at_the_end(job, tmp_path):
    made: list[tuple[int, int, list[int]]] = []
    job = dataclasses.replace(job, prompts=((5, 6, 7), (9,)), eval_every=4, on_sample=lambda *one: made.append(one))
    train(job)
    assert [(steps, number) for steps, number, _ in made] == [(4, 0), (4, 1), (6, 0), (6, 1)]
    model = AutoModelForCausalLM.from_pretrained(Path(job.output))
    for (_, number, ids), prompt in zip(made[2:], job.prompts, strict=True):
        row = torch.tensor([prompt])
        wanted = model.generate(
            input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
        assert ids == wanted[0, len(prompt) :].tolist(), number
