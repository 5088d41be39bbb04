"""Mixers in packed forwards convolve by the library that is installed and works, else by the project's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_backend
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny
from torch_backend import conv, convolution, operators

FAMILIES = ["qwen3_next", "qwen3_5_text", "mamba", "mamba2", "lfm2", "falcon_h1", "nemotron_h", "kimi_linear"]
SHORT = (5, 11, 3)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Triton kernels run on the CPU; what the convolution's forward kernel was given is listed."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled in this process: test_patch_on_gpu runs them")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(operators, "INTERPRETED", True)
    calls: list[int] = []
    launch = conv._forward

    def counted(x: Any, *rest: Any) -> Any:
        calls.append(len(x))
        return launch(x, *rest)

    monkeypatch.setattr(conv, "_forward", counted)
    convolution._library_fails.cache_clear()
    yield calls
    convolution._library_fails.cache_clear()
    convolution.packed_forward.cache_clear()  # it may hold a stand-in for the library


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_serves_mixers_where_the_library_is_absent(family: str, interpreted: list[int]) -> None:
    model, docs = tiny(family), documents(SHORT)
    truth = alone(model, docs)
    assert not interpreted
    torch_backend.patch(model, implementation="sdpa", verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=None)), truth, 2e-5)
    assert interpreted
    calls = len(interpreted)
    assert torch.equal(model(input_ids=docs[0][None]).logits[0], truth.logits[0]) and len(interpreted) == calls
    assert "crosspack's Triton kernel (not causal_conv1d: it is not installed)" in str(torch_backend.explain(model))


def test_plain_torch_convolves_where_triton_does_not_run() -> None:
    model = torch_backend.patch(tiny("lfm2"), verify=False)
    assert "convolution by plain torch (not causal_conv1d: it is not installed)" in str(torch_backend.explain(model))


def with_library(model: nn.Module, monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """As if ``causal_conv1d`` were installed and transformers had bound ``function`` of it."""
    module = __import__(type(model).__module__, fromlist=["_"])
    monkeypatch.setattr(module, convolution.NAME, function)
    monkeypatch.setattr(convolution, "find_spec", lambda name: object())
    convolution.packed_forward.cache_clear()


def test_a_library_that_works_is_used(monkeypatch: pytest.MonkeyPatch, interpreted: list[int]) -> None:
    model, docs = tiny("lfm2"), documents(SHORT)
    truth, calls = alone(model, docs), []
    plain = __import__(type(model).__module__, fromlist=["_"]).causal_conv1d_fn

    def library(x: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(x.shape)
        return plain(x, *args, **kwargs)

    with_library(model, monkeypatch, library)
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=None)), truth, 2e-5)
    assert len(calls) > 1 and not interpreted
    assert "convolution by causal_conv1d" in str(torch_backend.explain(model))


@pytest.mark.parametrize(
    ("result", "reason"),
    [("raises", "its trial run raised RuntimeError: no kernel image"), ("acausal", "its trial run was wrong by")],
)
def test_a_library_that_does_not_work_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, interpreted: list[int], result: str, reason: str
) -> None:
    model, docs = tiny("lfm2"), documents(SHORT)
    truth = alone(model, docs)

    def library(x: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
        if result == "raises":
            raise RuntimeError("no kernel image")
        return nn.functional.conv1d(x, weight.unsqueeze(1), bias, padding="same", groups=x.shape[1])

    with_library(model, monkeypatch, library)
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=None)), truth, 2e-5)
    assert interpreted
    assert f"crosspack's Triton kernel (not causal_conv1d: {reason}" in str(torch_backend.explain(model))


def test_what_the_kernel_does_not_know_is_left_to_the_model(interpreted: list[int]) -> None:
    def original(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x + 1

    x, weight = torch.zeros(1, 3, 4), torch.zeros(3, 2)
    assert convolution._convolve(original, x, weight, activation="gelu").eq(1).all()
    assert convolution._convolve(original, x, weight, initial_states=x).eq(1).all()
    assert convolution._convolve(original, x, weight, activation="silu").eq(0).all()
    assert len(interpreted) == 1
