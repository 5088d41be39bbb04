"""The torch trainer: packed and padded runs agree, a resumed run repeats to the bit, models are safetensors."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.planning.plan import plan
from packing_core.training.job import TrainJob, TrainResult
from packing_core.training.schedule import Corpus, EncodedDocument, Schedule
from tests.torch_backend.graphs import graphs as graphs
from tests.training_jobs import LLAMA, begun_and_resumed, losses, small_job, with_options
from torch_backend.job import train as training_job
from torch_backend.job.bench import _difference
from torch_backend.job.models import build_model
from torch_backend.job.train import train
from torch_backend.job.trainer import job_trainer

NOISY = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.3}


@pytest.fixture
def job() -> TrainJob:
    return small_job(LLAMA)


@pytest.fixture(scope="module")
def result() -> TrainResult:
    """The result of the job as it is."""
    return train(small_job(LLAMA))


@pytest.fixture(scope="module")
def plain(result) -> list[float]:
    return losses(result)


def test_nothing_is_trained_before_the_audit(job, monkeypatch):
    def leaks(model, implementation):
        raise UnsupportedModelError("documents see each other")

    seen = []
    monkeypatch.setattr(training_job, "verify", leaks)
    with pytest.raises(UnsupportedModelError, match="documents see each other"):
        train(dataclasses.replace(job, runs=("padded", "packed"), on_step=seen.append))
    assert seen == []


def test_the_first_loss_is_that_of_each_document_alone(job, plain):
    schedule = job.schedule
    model = build_model(job).eval()
    total = 0.0
    step = schedule.steps[0]
    for source in step.source.tolist():
        ids = torch.from_numpy(schedule.corpus.documents[source].copy()).long()
        trained = torch.from_numpy(schedule.corpus.trained[source].copy())
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        chosen = torch.log_softmax(logits[:-1].double(), -1).gather(1, ids[1:, None])[:, 0]
        total -= chosen[trained[1:]].sum().item()
    assert plain[0] == pytest.approx(total / schedule.trained_tokens[0], rel=1e-5)


def test_a_resumed_run_repeats_to_the_bit(job, tmp_path):
    job = dataclasses.replace(job, model=NOISY)
    whole = dataclasses.replace(job, output=tmp_path / "whole")
    expected = train(whole)
    parts = dataclasses.replace(job, output=tmp_path / "parts", save_every=2)
    resumed = begun_and_resumed(train, parts, step=4)
    assert losses(resumed) == losses(expected)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert first == second


def test_shapes_fit_all_rows_from_the_first_step_on(job, graphs, monkeypatch):
    """Rows whose longest document is longer than before would otherwise be compiled and recorded again."""

    def recorded(job, run, model, *args, **options):
        graphs.model = model
        return job_trainer(job, run, model, *args, **options)

    lengths = [3] * 20 + [30, 20, 9, 30]
    documents = [EncodedDocument(np.arange(n, dtype=np.int32), np.ones(n, np.bool_)) for n in lengths]
    rows = plan(lengths, 32, strategy="sequential", seed=None)
    job = dataclasses.replace(job, schedule=Schedule(Corpus.collect(iter(documents)), (rows,), rows_per_step=1))
    plain = losses(train(dataclasses.replace(job, runs=("padded", "packed"))))
    monkeypatch.setattr(training_job, "job_trainer", recorded)
    np.testing.assert_allclose(losses(train(job)), plain, rtol=1e-5)
    assert graphs.recorded == 1


def test_options_change_what_they_say_and_nothing_else(job, result, plain, tmp_path):
    assert result.attention == "sdpa" and result.audit.exact, result.audit.line
    assert losses(train(job)) == plain
    assert losses(train(with_options(job, seed=1))) != plain
    checkpointed = train(dataclasses.replace(job, gradient_checkpointing=True))
    np.testing.assert_allclose(losses(checkpointed), plain, rtol=1e-6)
    half = train(dataclasses.replace(with_options(job, precision="bfloat16"), output=tmp_path))
    assert losses(half) != plain
    np.testing.assert_allclose(losses(half), plain, rtol=2e-2)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_dropout_is_on_in_a_run_of_its_own_and_off_in_a_comparison(job):
    noisy = dataclasses.replace(job, model=NOISY)
    quiet = dataclasses.replace(job, model={**NOISY, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    compared = train(dataclasses.replace(noisy, runs=("padded", "packed")))
    np.testing.assert_allclose(losses(compared), losses(compared, "padded"), rtol=1e-4)
    assert losses(compared) == (without := losses(train(quiet)))
    assert losses(train(noisy)) != without


def test_the_output_is_a_hugging_face_folder_and_a_model_to_start_from(job, plain, tmp_path):
    from transformers import AutoModelForCausalLM

    train(dataclasses.replace(job, output=tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert "crosspack" not in (tmp_path / "config.json").read_text()
    assert model.config.use_cache  # which Trainer turns off
    again = losses(train(dataclasses.replace(job, model=str(tmp_path))))
    assert again[0] < plain[0] - 0.05


@pytest.fixture
def folder(job, tmp_path) -> Path:
    path = tmp_path / "model"
    build_model(job).save_pretrained(path)
    return path


def test_a_folder_gives_safetensors_alone_and_no_kernel_of_a_config(job, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "somebody/kernel"}))
    model = build_model(dataclasses.replace(job, model=str(folder)))
    assert model.config._attn_implementation == "sdpa"
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(PackingError, match=r"^--model .*model: [^\n]*safetensors[^\n]*$"):
        build_model(dataclasses.replace(job, model=str(folder)))


def test_code_in_the_models_folder_does_not_run_unless_trusted(job, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "custom.py").write_text(
        "import pathlib\n"
        "pathlib.Path(__file__).with_name('ran').touch()\n"
        f"pathlib.Path({str(folder / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom'\n"
        "class Custom(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "custom.CustomConfig"}}
    config["auto_map"]["AutoModelForCausalLM"] = "custom.Custom"
    (folder / "config.json").write_text(json.dumps(config))
    untrusted = dataclasses.replace(job, model=str(folder))
    with pytest.raises(PackingError, match=r"^--model [^\n]*$"):
        build_model(untrusted)
    assert not (folder / "ran").exists()
    assert type(build_model(dataclasses.replace(untrusted, trust_remote_code=True))).__name__ == "Custom"
    assert (folder / "ran").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "./nowhere"}, r"--model ./nowhere: no such folder or file, and not a hub name"),
        ({"model": {"model_type": "no_such_family"}}, r"--model .*no_such_family"),
        ({"model": {**LLAMA, "vocab_size": 9}}, r"the data has token 63 and the model 9 embeddings"),
        (
            {"model": {**NOISY, "n_positions": 20}},
            r"a document has 28 tokens and the model 20 positions: pass --capacity",
        ),
        ({"device": "abacus"}, r"--device abacus: "),
        ({"attention": "abacus"}, r"abacus"),
        ({"resume": True}, r"--resume needs --output"),
    ],
)
def test_what_cannot_be_trained_says_why(job, change, says):
    with pytest.raises(PackingError, match=says):
        train(dataclasses.replace(job, **change))


def test_the_difference_is_relative_to_the_largest_logit_and_infinite_where_one_is_not_a_number() -> None:
    right = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    assert _difference([torch.tensor([1.0, -3.0]), torch.tensor([2.0])], right) == pytest.approx(0.25)
    assert _difference([torch.tensor([1.0, -4.0]), torch.tensor([math.nan])], right) == math.inf
