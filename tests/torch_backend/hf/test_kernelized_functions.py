"""Functions of modeling files as the library ``kernels`` leaves them, where transformers takes its version: modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from torch import nn

from tests.torch_backend.models import alone, assert_same, documents, packed, patched


def kernelizable(function: Callable[..., Any]) -> nn.Module:
    """Does what ``kernels.use_kernel_forward_from_hub`` does to a function."""

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    signature = inspect.signature(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()]
    )
    return Func()


@pytest.fixture(params=["qwen3_next", "mamba2"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = request.param
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    for function in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "apply_rotary_pos_emb"):
        if inspect.isfunction(found := getattr(module, function, None)):  # a module already with an accepted kernels
            monkeypatch.setattr(module, function, kernelizable(found))
    return name


def test_hybrids_are_exact(family: str) -> None:
    model, docs = patched(family), documents((5, 1, 14))
    assert_same(packed(model, docs), alone(model, docs))
