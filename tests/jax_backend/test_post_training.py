"""The losses of the JAX examples of DPO and GRPO, over a mesh, against torch on each document alone."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx

from jax_backend import make_train_step
from jax_backend.model import weights
from tests.jax_backend.models import documents, on_disk, saved
from torch_backend.losses.preference import dpo_loss

EXAMPLES = Path(__file__).parents[2] / "examples"
RATE = 1.0  # of plain descent, so that a step subtracts the gradient


def example(name: str) -> dict[str, Any]:
    """The functions of an example, whose loop does not run."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


def step_over_devices(folder: Path, loss_fn: Any, batch: Any, devices: int = 4) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a step over a mesh, and the gradients by their names in checkpoints."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    model = weights.load(folder, implementation="chunked")
    train_step = make_train_step(model, optax.sgd(RATE), mesh, loss_fn=loss_fn)
    before = weights.export(nnx.state(model, nnx.Param))
    state, metrics = train_step(train_step.init(), batch)
    after = weights.export(nnx.state(train_step.model(state), nnx.Param))
    return float(metrics["loss"]), {name: (before[name] - after[name]) / RATE for name in before}


def assert_as_torch(
    model: torch.nn.Module, wanted: torch.Tensor, loss: float, gradients: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
    wanted.backward()
    assert abs(loss - float(wanted.detach())) < tolerance * max(1.0, abs(loss))
    expected = on_disk(model, {name: parameter.grad for name, parameter in model.named_parameters()})
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    assert largest > 0 and gradients.keys() >= expected.keys()
    for name, gradient in expected.items():
        assert np.abs(gradients[name] - gradient).max() < tolerance * largest, name


def alone(model: torch.nn.Module, ids: np.ndarray, prompt: int) -> torch.Tensor:
    """Log-probabilities of the completion of one document in a forward of its own."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    logprobs = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None])[prompt - 1 :, 0]


def drawn(batch: Any, seed: int) -> np.ndarray:
    """Random log-probabilities of trained tokens, near those of a model that knows nothing."""
    rng = np.random.default_rng(seed)
    noise = -4 + 0.3 * rng.standard_normal(batch["targets"].shape)
    return np.where(batch["loss_weights"] > 0, noise, 0).astype(np.float32)


def of_document(values: np.ndarray, batch: Any, document: int) -> torch.Tensor:
    """The values of one document's trained tokens, in order."""
    here = (batch["document_ids"] == document) & (batch["loss_weights"] > 0)
    return torch.from_numpy(values[here])


def test_dpo_over_a_mesh_is_that_of_torch(tmp_path: Path) -> None:
    dpo = example("jax_dpo")
    model = saved("llama", tmp_path)
    answers = documents(2 * dpo["PAIRS"], longest=24)
    answers = [np.concatenate([answer, answer[:2]]) for answer in answers]
    prompts = [1 + i % 3 for i in range(len(answers))]
    batch = dpo["rows_of"](answers, prompts, devices=4)
    batch["reference"] = drawn(batch, seed=1)

    loss, gradients = step_over_devices(tmp_path, dpo["dpo_loss"], batch)
    sums = torch.stack([alone(model, ids, prompt).sum() for ids, prompt in zip(answers, prompts, strict=True)])
    expected = torch.stack([of_document(batch["reference"], batch, i).sum() for i in range(len(answers))])
    pairs = dpo_loss(sums[::2], sums[1::2], expected[::2], expected[1::2], beta=dpo["BETA"])
    assert_as_torch(model, pairs.mean(), loss, gradients)


def test_grpo_over_a_mesh_is_that_of_torch(tmp_path: Path) -> None:
    grpo = example("jax_grpo")
    model = saved("llama", tmp_path)
    count, prompt, clip = grpo["GROUPS"] * grpo["SAMPLES"], grpo["PROMPT"], grpo["CLIP"]
    completions = documents(count, longest=grpo["LONGEST"])
    rewards = np.random.default_rng(0).standard_normal(count)
    batch = grpo["rows_of"](completions, rewards, devices=4)
    batch["old"] = drawn(batch, seed=2)

    loss, gradients = step_over_devices(tmp_path, grpo["grpo_loss"], batch)
    groups = torch.from_numpy(rewards).reshape(grpo["GROUPS"], -1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    means: list[torch.Tensor] = []
    for number, (completion, advantage) in enumerate(zip(completions, advantages.ravel(), strict=True)):
        logprobs = alone(model, np.concatenate([prompt, completion]), len(prompt))
        ratio = torch.exp(logprobs - of_document(batch["old"], batch, number))
        clipped = ratio.clamp(1 - clip, 1 + clip)
        means.append(-torch.minimum(ratio * advantage, clipped * advantage).mean())
    assert_as_torch(model, torch.stack(means).mean(), loss, gradients)
