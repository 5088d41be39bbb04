"""Verbs that torch and JAX share run the function of the framework whose objects they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import crosspack
import jax_backend
import torch_backend
from crosspack import dispatch
from packing_core.errors import MissingExtraError, UnsupportedError, UnsupportedModelError


class Own(nnx.Module):
    """A model of a user's own."""


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (lambda: torch.zeros(1), "torch_backend"),
        (lambda: torch.nn.Linear(1, 1), "torch_backend"),
        (lambda: jnp.zeros(1), "jax_backend"),
        (lambda: {"layers": [{"kernel": jnp.zeros(1)}]}, "jax_backend"),
        (lambda: optax.sgd(1.0), "jax_backend"),
        (Own, "jax_backend"),
        (lambda: np.zeros(1), None),
        (lambda: "my-model", None),
    ],
)
def test_the_framework_of_an_object_is_that_of_its_class(make: Callable[[], Any], backend: str | None) -> None:
    """Objects are made in the test: an array of JAX, made while tests are collected, would settle its devices."""
    assert dispatch.backend_of(iter([make()])) == backend


def test_every_name_that_both_backends_have_is_shared() -> None:
    both = {name for name in {*torch_backend.__all__} & {*jax_backend.__all__} if name[0].islower()}
    assert both | {"patch", "load"} == set(dispatch.SHARED)
    assert all(getattr(crosspack, name) is verb and verb.__name__ == name for name, verb in dispatch.SHARED.items())


def test_one_name_computes_the_loss_of_either_framework() -> None:
    logits, targets = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32), np.array([1, -100, 2, 3, 6])
    ours = crosspack.packed_cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets))
    theirs = crosspack.packed_cross_entropy(jnp.asarray(logits), targets=jnp.asarray(targets))
    assert isinstance(ours[0], torch.Tensor) and not isinstance(theirs[0], torch.Tensor)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-6)


def test_what_one_framework_has_alone_names_the_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"a JAX model needs none: crosspack.load\(folder\) returns"):
        crosspack.patch(Own())
    with pytest.raises(UnsupportedError, match=r"an argument of torch: for torch, AutoModelForCausalLM"):
        crosspack.load("my-model", dtype=torch.bfloat16)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'crosspack\[jax\]'; for torch, AutoModelForCausalLM"):
        crosspack.load("my-model")


def test_the_capacity_stands_second_wherever_there_is_one() -> None:
    """A collator takes the model first; a plan holds its capacity, and a rule takes no documents."""
    for name in dir(crosspack):
        value = getattr(crosspack, name)
        if not callable(value) or name in ("PackPlan", "ContextPlan", "RowRule"):
            continue
        try:
            names = [*inspect.signature(value).parameters]
        except ValueError:
            continue
        found = [number for number, each in enumerate(names) if each in ("capacity", "capacity_or_plan")]
        assert found in ([], [1]), f"{name}: {names}"
