"""Options of ``crosspack train --backend jax``: bfloat16 weights, adapters, evaluation, several devices."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from crosspack.cli import app
from crosspack.cli.checks import read_mesh
from crosspack.encoding.tokenizer import train_tokenizer
from jax_backend.job import _begin, train
from jax_backend.model.decoder import SCANNED_FROM
from jax_backend.model.weights import export
from packing_core.errors import PackingError
from packing_core.training.job import TrainJob
from tests import training_jobs
from tests.torch_backend.job.test_train_options import loss_of_documents, norm_of_gradients, with_evaluation
from tests.training_jobs import begun_and_resumed, losses, small_job, with_options

LLAMA = {**training_jobs.LLAMA, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
HALF = {"precision": "bfloat16", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> TrainJob:
    """Three steps of four rows; ``xla`` is the quickest to compile."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    job = small_job(str(folder), device="cpu", attention="xla")
    return dataclasses.replace(job, schedule=dataclasses.replace(job.schedule, limit=3))


@pytest.fixture(scope="module")
def alone(job) -> Any:
    """The run on one device, with an evaluation."""
    return train(with_evaluation(job))


@pytest.mark.slow
def test_bfloat16_weights_are_trained_and_written_as_such(job, alone, tmp_path) -> None:
    result = train(dataclasses.replace(with_options(job, **HALF, master_weights=True), output=tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert losses(result) != losses(alone)
    np.testing.assert_allclose(losses(result), losses(alone), rtol=2e-2)
    assert result.audit.exact, result.audit.line


@pytest.mark.parametrize(("master", "kept"), [(True, "float32"), (False, "bfloat16")])
def test_the_optimizer_of_bfloat16_weights_keeps_float32_if_asked(job, master, kept) -> None:
    step, *_ = _begin(with_options(job, **HALF, master_weights=master), None)
    floating = [leaf for leaf in jax.tree.leaves(step.shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype.name for leaf in floating} == {kept}
    assert step.compute_dtype == (jnp.bfloat16 if master else None)


@pytest.mark.slow
def test_adapters_alone_are_trained_and_peft_reads_them(job, alone, tmp_path) -> None:
    adapted = with_options(job, lora=2, lr=0.05)
    result = train(dataclasses.replace(with_evaluation(adapted), output=tmp_path / "out"))
    assert losses(result)[0] == pytest.approx(losses(alone)[0], rel=1e-6)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = transformers.AutoModelForCausalLM.from_pretrained(job.model)
    untrained = loss_of_documents(base, job.schedule)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(written) == 2 * 7 and all(tensor.abs().max() > 0 for tensor in written.values())
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    evaluated = result.records["packed"][-1].eval_loss
    assert evaluated == pytest.approx(loss_of_documents(model, job.schedule), rel=1e-5) and evaluated < untrained


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 3}, {"data": 2, "tensor": 2}, {"context": 2}], ids=str)
def test_devices_share_the_rows_of_a_step_and_its_evaluation(job, alone, mesh, tmp_path) -> None:
    result = train(dataclasses.replace(with_evaluation(job), mesh=mesh, output=tmp_path / "out"))
    np.testing.assert_allclose(losses(result), losses(alone), rtol=1e-5)
    evaluated = result.records["packed"][-1].eval_loss
    assert evaluated == pytest.approx(alone.records["packed"][-1].eval_loss, rel=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert evaluated == pytest.approx(loss_of_documents(model, job.schedule), rel=1e-5)
    assert f"{np.prod(list(mesh.values()))} devices" in result.device
    start = transformers.AutoModelForCausalLM.from_pretrained(job.model)
    wanted = norm_of_gradients(start, job.schedule)
    assert [each.records["packed"][0].grad_norm for each in (alone, result)] == pytest.approx([wanted] * 2, rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_over_other_devices(job, alone, tmp_path) -> None:
    parts = dataclasses.replace(job, output=tmp_path / "out", save_every=1, mesh={"fsdp": 2})
    resumed = begun_and_resumed(train, parts, step=2, mesh={"data": 2})
    np.testing.assert_allclose(losses(resumed), losses(alone), rtol=1e-5)


@pytest.mark.parametrize("layers", [1, SCANNED_FROM])
def test_weight_decay_leaves_norms_and_biases_alone(job, layers) -> None:
    model = {**LLAMA, "num_hidden_layers": layers, "model_type": "llama", "attention_bias": True}
    step, *_ = _begin(with_options(dataclasses.replace(job, model=model), weight_decay=0.5), None)
    state = step.init()
    params = jax.tree.map(jnp.ones_like, state.params)
    none = jax.tree.map(jnp.zeros_like, state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        updates, _ = jax.jit(step.tx.update)(none, state.opt_state, params)
    moved = {name for name, update in export(updates).items() if update.any()}
    assert moved == {name for name, update in export(updates).items() if update.ndim == 2}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(None, {}), ("data=2, fsdp=4", {"data": 2, "fsdp": 4}), ("tensor=2,context=3", {"tensor": 2, "context": 3})],
)
def test_a_mesh_is_axes_and_devices(text, wanted) -> None:
    assert read_mesh(text) == wanted


def test_another_mesh_is_refused() -> None:
    for text in ("", "4", "data=", "data=0", "stage=2", "data=2,data=2", "fsdp=-1"):
        with pytest.raises(PackingError, match=r"pass the devices of each axis, such as data=2 or fsdp=4,tensor=2"):
            read_mesh(text)


def test_more_devices_than_there_are_are_refused(job) -> None:
    with pytest.raises(PackingError, match="--mesh data=64: jax finds cpu:0, cpu:1"):
        train(dataclasses.replace(job, mesh={"data": 64}))


@pytest.mark.slow
def test_the_console_command_takes_them(tmp_path) -> None:
    tokenizer = train_tokenizer(("a b c d e", "f g h"), 64)
    config = transformers.LlamaConfig(**LLAMA | {"vocab_size": len(tokenizer)})
    for part in (tokenizer, transformers.LlamaForCausalLM(config)):
        part.save_pretrained(tmp_path / "start")
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": "a b c d e f g h " * n}) for n in range(1, 9)))
    command = ["train", "--backend", "jax", "--model", tmp_path / "start", "--data", tmp_path / "data.jsonl"]
    command += ["--eval-data", tmp_path / "data.jsonl", "--capacity", 256, "--device", "cpu", "--attention", "xla"]
    command += ["--dtype", "bfloat16", "--lora", 2, "--mesh", "data=2", "--steps", 2, "--output", tmp_path / "out"]
    run = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "130"})
    result = run.invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    assert "evaluation loss" in result.output and "2 devices (data=2)" in result.output
    assert json.loads((tmp_path / "out" / "crosspack.json").read_text())["runs"]["packed"]
    assert {'mesh: "data=2"', "lora: 2"} <= set((tmp_path / "out" / "run.yaml").read_text().splitlines())
