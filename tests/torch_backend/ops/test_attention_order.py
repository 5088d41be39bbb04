"""The order in which "auto" asks: recorded per device, timed once where nothing is recorded, never while tracing."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from tests.torch_backend.hf.test_attention_implementations import REQUEST
from tests.torch_backend.ranks import everyones, on_ranks
from torch_backend.ops.attention import IMPLEMENTATIONS, load, rejections, select
from torch_backend.ops.attention.order import COLUMNS, CPU, CUDA, KINDS, RECORDED, order
from torch_backend.ops.attention.reference import REFERENCE
from torch_backend.ops.attention.sdpa import SDPA
from torch_backend.ops.trial import decided_by_one_rank

module = import_module("torch_backend.ops.attention.order")
SHORT = replace(REQUEST, tokens=16_000, segments=64)
LONG = replace(REQUEST, tokens=16_000, segments=4)
VERY_LONG = replace(REQUEST, tokens=16_384, segments=1, max_seqlen=16_384)
# what torch's fused kernels have no argument for
SCORED = {"sinks": {"sinks": True}, "softcap": {"softcap": 50.0}, "alibi": {"alibi": True}}
HAS = {**SCORED, "values": {"value_dim": 32}, "window": {"window": 300}, "plain": {}}


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


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def products():
    """torch's setting of matrix products on a GPU, as it was afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


@pytest.fixture
def without_flash_attention(monkeypatch):
    """No library is installed, triton serves everything, and the trial runs of varlen and flex pass."""
    for name in ("flash4", "flash3", "flash2", "xformers"):
        monkeypatch.setattr(load(name), "supports", lambda request: "cannot be imported")
    monkeypatch.setattr(load("triton"), "supports", lambda request: None)
    for name in ("varlen", "flex"):
        monkeypatch.setattr(load(name), "supports", load(name).refuses)


def test_every_order_holds_every_implementation_but_the_reference_once():
    assert sorted(RECORDED[9, 0]) == sorted(COLUMNS)
    orders = [names for columns in RECORDED.values() for kinds in columns.values() for names in kinds]
    for names in (CUDA, *orders):
        assert sorted((*names, "reference")) == sorted(IMPLEMENTATIONS)
    assert all(len(kinds) == len(KINDS) for columns in RECORDED.values() for kinds in columns.values())


@pytest.mark.parametrize("has", [*HAS.values(), {"causal": False}, {"dropout": 0.1}, {"host_lengths": False}], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whatever_the_reference_serves_sdpa_serves_in_its_place(device, has):
    request = replace(REQUEST, device=torch.device(device), **has)
    assert (SDPA.supports(request) is None) == (REFERENCE.supports(request) is None)
    assert "reference" not in {*CPU, *CUDA}


def test_off_the_gpu_nothing_is_asked_of_the_device():
    assert order(replace(REQUEST, device=torch.device("cpu")), load) == CPU


@pytest.mark.parametrize("column", HAS)
def test_a_request_belongs_to_the_column_of_what_it_has(column):
    request = replace(REQUEST, **HAS[column])
    assert next(name for name, has in COLUMNS.items() if has(request)) == column


def test_a_window_that_no_document_exceeds_is_none():
    assert COLUMNS["window"](replace(REQUEST, window=511)) and not COLUMNS["window"](replace(REQUEST, window=512))


def test_a_recorded_device_takes_the_order_of_its_documents_lengths(hopper):
    plain = RECORDED[9, 0]["plain"]
    assert [order(request, load) for request in (SHORT, LONG)] == list(plain)


def test_documents_behind_a_window_count_as_long_as_the_window(hopper):
    window = RECORDED[9, 0]["window"]
    windows = 128, 4_096
    assert [order(replace(VERY_LONG, window=each), load) for each in windows] == list(window)


@pytest.mark.usefixtures("hopper", "without_flash_attention")
def test_documents_of_any_length_run_in_triton_where_flash_attention_is_absent():
    for has in ({}, {"value_dim": 32}, *SCORED.values(), {"window": 4_096}, {"softcap": 50.0, "window": 4_096}):
        for request in (SHORT, LONG, VERY_LONG):
            assert select(replace(request, **has)) == "triton"


@pytest.mark.usefixtures("hopper", "without_flash_attention")
@pytest.mark.parametrize("has", SCORED.values(), ids=SCORED)
def test_what_builds_score_matrices_is_tried_last_and_the_answers_say_so(has):
    answers = rejections(replace(VERY_LONG, **has))
    assert list(answers)[-1] == "sdpa"
    assert answers["sdpa"] == "tried last, because it builds score matrices"
    assert answers["triton"] is None
    assert rejections(VERY_LONG)["sdpa"] is None


@pytest.mark.parametrize("has", [{"window": 8_192}, {"window": 64, "causal": False}], ids=str)
def test_a_window_counts_only_where_a_document_exceeds_it(has):
    request = replace(REQUEST, device=torch.device("cpu"), **has)
    assert SDPA.last_resort(replace(request, max_seqlen=has["window"])) is None
    assert SDPA.last_resort(replace(request, max_seqlen=has["window"] + 1)) == "it builds score matrices"


@pytest.mark.parametrize("allowed", [False, True])
def test_float32_on_a_gpu_goes_through_torchs_kernel_only_where_tf32_is_allowed(products, allowed):
    products.fp32_precision = "tf32" if allowed else "ieee"
    request = replace(REQUEST, device=torch.device("cuda"), dtype=torch.float32)
    assert (SDPA.last_resort(request) is None) == allowed
    assert SDPA.last_resort(replace(request, dtype=torch.bfloat16)) is None
    assert SDPA.last_resort(replace(request, device=torch.device("cpu"))) is None


@pytest.mark.parametrize("has", SCORED.values(), ids=SCORED)
def test_what_builds_score_matrices_is_no_reason_against_the_only_one_that_serves(has):
    request = replace(REQUEST, device=torch.device("cpu"), **has)
    assert rejections(request) == {"sdpa": None}
    assert rejections(request, "sdpa") == {"sdpa": None}


def test_what_builds_score_matrices_is_not_timed(monkeypatch, unknown_gpu):
    load, timed = unknown_gpu
    load("varlen").last_resort = lambda request: "it builds score matrices"
    assert order(SHORT, load)[-1] == "varlen"
    assert {name for name, _ in timed} == {"triton", "flash4"}


def test_an_unknown_device_is_timed_once_per_shape_and_says_so(unknown_gpu, caplog):
    load, timed = unknown_gpu
    with caplog.at_level(logging.INFO, logger=module.__name__):
        first = order(SHORT, load)
        assert order(replace(SHORT, tokens=20_000), load) == first
        assert order(replace(SHORT, key_tokens=30_000), load) == first  # each batch of cut documents has other keys
    assert first[:3] == ("triton", "varlen", "flash4") and sorted(first) == sorted(CUDA)
    assert sorted(timed) == [("flash4", 256), ("triton", 256), ("varlen", 256)]
    assert "documents of 256 tokens on cuda: triton 1.00, varlen 2.00, flash4 3.00" in caplog.text
    assert len(caplog.records) == 1
    order(LONG, load)
    assert len(timed) == 6 and timed[-1][1] == 2_048


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Starts another process of a job of two ranks, which times nothing yet; all share one store."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def another():
        store = torch.distributed.FileStore(str(tmp_path / "store"), -1)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(module, "_timed", {})

    return another


def test_ranks_of_a_job_keep_the_order_that_the_first_of_them_measured(unknown_gpu, ranks, monkeypatch):
    load, timed = unknown_gpu
    ranks()
    first, count = order(replace(SHORT, device=torch.device("cuda:0")), load), len(timed)
    ranks()
    monkeypatch.setattr(module, "milliseconds", lambda implementation, trial: -len(timed))
    assert order(replace(SHORT, device=torch.device("cuda:1")), load) == first and len(timed) == count
    other = order(LONG, load)  # which the first rank never asked
    ranks()
    assert order(LONG, load) == other


def test_ranks_that_time_at_once_keep_one_order(unknown_gpu, ranks, monkeypatch):
    load, _ = unknown_gpu
    ranks()
    times = {"triton": 3.0, "varlen": 1.0, "flash4": 2.0}

    def while_another_rank_answers(implementation, trial):
        name = next(name for name in times if load(name) is implementation)
        if name == "triton":
            with monkeypatch.context() as other:
                other.setattr(module, "milliseconds", lambda *_: 0.0)
                other.setattr(module, "_timed", {})
                answers.append(order(SHORT, load))
        return times[name]

    answers = []
    monkeypatch.setattr(module, "milliseconds", while_another_rank_answers)
    assert order(SHORT, load) == answers[0]


def orders(question):
    """The order that a rank keeps, of which the ranks measured others."""
    rank = torch.distributed.get_rank()

    def measured():
        time.sleep(0.2 * rank)
        return "triton varlen" if rank else "varlen triton"

    # nobody waits for the other rank
    assert decided_by_one_rank(f"{question}, asked by rank {rank} alone", measured) == measured()
    return everyones(decided_by_one_rank(question, measured))


@pytest.mark.slow
def test_processes_of_a_job_keep_one_order():
    assert len(set(on_ranks(orders, "16,384 tokens"))) == 1


def test_nothing_is_timed_in_a_trace_a_capture_or_a_deterministic_run(unknown_gpu, monkeypatch):
    load, timed = unknown_gpu
    assert order(replace(SHORT, compiling=True), load) == CUDA
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert order(SHORT, load) == CUDA
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert order(SHORT, load) == CUDA
    assert timed == []


@pytest.mark.gpu
def test_a_trial_runs(monkeypatch):
    monkeypatch.setattr(module, "RECORDED", {})
    monkeypatch.setattr(module, "_timed", {})
    request = replace(REQUEST, tokens=16_384, segments=64)
    load = import_module("torch_backend.ops.attention").load
    ranked = order(request, load)
    assert sorted(ranked) == sorted(CUDA) and load(ranked[0]).supports(request) is None
