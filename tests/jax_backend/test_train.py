"""``crosspack train --backend jax``: the torch trainer's losses, resumption to the bit, models that others load."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import torch_backend.job.train
from crosspack.cli import app
from crosspack.encoding.tokenizer import train_tokenizer
from crosspack.reading.corpus import standard_library_records
from jax_backend.job import train
from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from packing_core.training.job import TrainJob
from tests import training_jobs
from tests.training_jobs import begun_and_resumed, losses, small_job

LLAMA = {**training_jobs.LLAMA, "num_hidden_layers": 1}


@pytest.fixture
def job() -> TrainJob:
    return small_job(LLAMA, device="cpu")


@pytest.mark.slow
def test_each_run_has_the_losses_of_torchs_packed_run(job, tmp_path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "start")
    job = dataclasses.replace(job, model=str(tmp_path / "start"))
    wanted = losses(torch_backend.job.train.train(job))
    assert wanted[0] - wanted[-1] > 0.05  # it learns, or equal losses would mean little
    result = train(dataclasses.replace(job, runs=("padded", "grouped", "packed"), output=tmp_path / "out"))
    for run in ("padded", "grouped", "packed"):
        np.testing.assert_allclose(losses(result, run), wanted, rtol=1e-4)
    assert result.audit.exact, result.audit.line
    assert result.attention == "chunked"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 64


@pytest.mark.slow
def test_a_resumed_run_repeats_to_the_bit(job, tmp_path) -> None:
    job = dataclasses.replace(job, attention="xla")  # the quickest to compile
    expected = train(dataclasses.replace(job, output=tmp_path / "whole"))
    parts = dataclasses.replace(job, output=tmp_path / "parts", save_every=2)
    resumed = begun_and_resumed(train, parts, step=4)
    assert losses(resumed) == losses(expected)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert first == second


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"attention": "flash"}, PackingError, "--attention flash: pass auto or one of xla, chunked, pallas"),
        ({"trust_remote_code": True}, UnsupportedError, "--trust-remote-code: the JAX backend never runs code of"),
        ({"model": LLAMA | {"model_type": "gpt2"}}, UnsupportedModelError, "the flax decoder computes llama, qwen2"),
        ({"model": "no/such-model"}, PackingError, "--model no/such-model: neither a folder nor"),
        ({"device": "cuda:3"}, PackingError, "--device cuda:3: jax finds cpu:0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_cannot_do_is_said_before_anything_runs(job, changes, kind, text, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(kind, match=text):
        train(dataclasses.replace(job, **changes))


@pytest.fixture
def data(tmp_path) -> Path:
    first = itertools.islice(standard_library_records(), 40)
    records = [{"text": " ".join(record["completion"].split()[:12])} for record in first]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return tmp_path / "data.jsonl"


@pytest.mark.slow
def test_the_console_command_compares_packed_with_padded(data, tmp_path) -> None:
    folder, out = tmp_path / "start", tmp_path / "out"
    tokenizer = train_tokenizer((json.loads(line)["text"] for line in data.read_text().splitlines()), 300)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": len(tokenizer)}))
    command = ["train", "--backend", "jax", "--compare", "--model", folder / "config.json", "--data", data]
    command += ["--capacity", 128, "--steps", 2, "--rows-per-step", 2, "--device", "cpu", "--output", out]
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "130"}).invoke(app, [str(word) for word in command])
    assert result.exit_code == 0, result.output
    for line in ("real tokens/s", "max loss difference from packed", "chunked on cpu", "audit: exact"):
        assert line in result.output
    runs = json.loads((out / "crosspack.json").read_text())["runs"]
    packed = [record["loss"] for record in runs["packed"]]
    assert packed[0] == pytest.approx(np.log(len(tokenizer)), rel=0.05)
    for other in ("padded", "grouped"):
        np.testing.assert_allclose([record["loss"] for record in runs[other]], packed, rtol=1e-5)
    assert (out / "compare.png").exists()
