"""The order in which "auto" asks: recorded per device, timed once where nothing is recorded, never while tracing."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from tests.torch_backend.test_attention_implementations import REQUEST
from torch_backend.ops.attention import IMPLEMENTATIONS
from torch_backend.ops.attention.order import CPU, CUDA, RECORDED, order

module = import_module("torch_backend.ops.attention.order")
SHORT = replace(REQUEST, tokens=16_000, segments=64)
LONG = replace(REQUEST, tokens=16_000, segments=4)


class Fake:
    def __init__(self, reason: str | None) -> None:
        self.reason = reason

    def supports(self, request):
        return self.reason


@pytest.fixture
def unknown_gpu(monkeypatch):
    """A device without a record, on which triton takes 1 ms, varlen 2 ms, flash4 3 ms and nothing else serves."""
    speeds = {"triton": 1.0, "varlen": 2.0, "flash4": 3.0}
    served = {name: Fake(None if name in speeds else "not here") for name in IMPLEMENTATIONS}
    timed = []

    def milliseconds(implementation, trial):
        name = next(name for name, fake in served.items() if fake is implementation)
        timed.append((name, trial.max_seqlen))
        return speeds[name]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (4, 2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "milliseconds", milliseconds)
    monkeypatch.setattr(module, "_timed", {})
    return served.__getitem__, timed


def test_every_order_holds_every_implementation_once():
    for names in (CUDA, *(each for orders in RECORDED.values() for each in orders)):
        assert sorted(names) == sorted(IMPLEMENTATIONS)
    assert set(CPU) <= set(IMPLEMENTATIONS)


def test_off_the_gpu_nothing_is_asked_of_the_device():
    assert order(replace(REQUEST, device=torch.device("cpu")), IMPLEMENTATIONS.__getitem__) == CPU


def test_a_recorded_device_takes_the_order_of_its_documents_lengths(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert order(SHORT, IMPLEMENTATIONS.__getitem__) == RECORDED[9, 0][0]
    assert order(LONG, IMPLEMENTATIONS.__getitem__) == RECORDED[9, 0][1]
    assert order(replace(LONG, segments=1), IMPLEMENTATIONS.__getitem__) == RECORDED[9, 0][2]


def test_an_unknown_device_is_timed_once_per_shape_and_says_so(unknown_gpu, caplog):
    load, timed = unknown_gpu
    with caplog.at_level(logging.INFO, logger=module.__name__):
        first = order(SHORT, load)
        assert order(replace(SHORT, tokens=20_000), load) == first
    assert first[:3] == ("triton", "varlen", "flash4") and sorted(first) == sorted(CUDA)
    assert sorted(timed) == [("flash4", 256), ("triton", 256), ("varlen", 256)]
    assert "documents of 256 tokens on cuda: triton 1.00, varlen 2.00, flash4 3.00" in caplog.text
    assert len(caplog.records) == 1
    order(LONG, load)
    assert len(timed) == 6 and timed[-1][1] == 2_048


def test_nothing_is_timed_in_a_trace_a_capture_or_a_deterministic_run(unknown_gpu, monkeypatch):
    load, timed = unknown_gpu
    assert order(replace(SHORT, compiling=True), load) == CUDA
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert order(SHORT, load) == CUDA
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert order(SHORT, load) == CUDA
    assert timed == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trial_runs(monkeypatch):
    monkeypatch.setattr(module, "RECORDED", {})
    monkeypatch.setattr(module, "_timed", {})
    request = replace(REQUEST, tokens=16_384, segments=64)
    load = import_module("torch_backend.ops.attention")._load
    ranked = order(request, load)
    assert sorted(ranked) == sorted(CUDA) and load(ranked[0]).supports(request) is None
