"""A captured step is the step itself, to the bit, whatever the boundaries; compiled layers share one graph."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import collate, documents, patched, tiny
from torch_backend import patch
from torch_backend.hf.inputs import guard
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.ops import scan as scans
from torch_backend.ops.scan import order
from torch_backend.steps import cuda_graph as captured
from torch_backend.steps.cuda_graph import CapturedStep, compile_layers

# lengths of the documents of a row of 128, a different packing each
ROWS = ((5, 19, 33, 7, 40), (60, 60), (1, 2, 3, 90), (128,), (64, 64), (17, 30, 30, 30))


@pytest.fixture
def stand_in(monkeypatch):
    """CUDA graphs on the CPU: what is recorded is run again by ``replay``. Counts recordings."""
    seen = SimpleNamespace(recorded=0)

    class Graph:
        def replay(self):
            step = seen.step
            step.result.copy_(step.step(step.batch))

    @contextmanager
    def recording(graph, **options):
        seen.recorded += 1
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(captured, "DEVICE", "cpu")
    return seen


def row(value: int, width: int = 4) -> dict:
    return {"input_ids": torch.full((1, width), value), "max_length_q": 8, "packed_lengths": (value,)}


def test_it_warms_up_records_once_and_replays_on_the_batch_of_each_call(stand_in):
    step = stand_in.step = CapturedStep(lambda batch: batch["input_ids"].sum(), warm_up=2)
    found = [int(step(row(value))) for value in (1, 2, 3, 4, 5)]
    assert found == [4, 8, 12, 16, 20]
    assert stand_in.recorded == 1


def test_results_are_the_callers_own(stand_in):
    step = stand_in.step = CapturedStep(lambda batch: batch["input_ids"].sum(), warm_up=0)
    first = step(row(1))
    step(row(2))
    assert int(first) == 4


def test_values_that_would_be_frozen_do_not_reach_the_step(stand_in):
    step = stand_in.step = CapturedStep(lambda batch: torch.tensor("packed_lengths" in batch), warm_up=1)
    assert not step(row(1)) and not step(row(2))


@pytest.mark.parametrize(
    ("other", "changed"),
    [(row(1, width=5), "input_ids"), (row(1) | {"max_length_q": 9}, "max_length_q"), (row(1) | {"new": 1}, "new")],
)
def test_a_batch_of_another_form_is_refused_by_what_changed(stand_in, other, changed):
    step = stand_in.step = CapturedStep(lambda batch: batch["input_ids"].sum())
    step(row(1))
    with pytest.raises(LayoutError, match=rf"batches of one form, and {changed} changed: give PackedCollator"):
        step(other)


def test_disabled_it_hands_the_batch_through():
    batch = row(1)
    assert CapturedStep(lambda given: given, enabled=False)(batch) is batch


def fixed(lengths: tuple[int, ...], row: int = 128) -> dict:
    """A row in a shape that does not depend on the documents, boundaries on the device alone."""
    batch = collate(documents(lengths), capacity=row, max_seqlen=row, bucket=16)
    return {name: value for name, value in batch.items() if name != "packed_lengths"}


def mean_loss(model, batch) -> torch.Tensor:
    total, weight = causal_lm_loss(model, batch)
    return total / weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "graphs", "row"), [("qwen2", 2, 64), ("qwen3_5_text", 3, 128), ("mamba2", 1, 64)]
)  # of each kind of layer, of the norm, which is plain in Mamba-2
def test_compiled_layers_share_a_graph_over_layers_and_segmentations(interpreted, family, graphs, row, monkeypatch):
    model = patch(tiny(family), implementation="triton", verify=False)
    state_of(model).guard = DeviceGuard()  # boundaries on the CPU would be read, and have as many entries as segments
    segmentations = [(5, 19, 33, row - 57), (1, 2, 54, row - 57)]

    def gradients(lengths: tuple[int, ...]) -> list[torch.Tensor]:
        return list(torch.autograd.grad(mean_loss(model, fixed(lengths, row)), list(model.parameters())))

    plain = [gradients(lengths) for lengths in segmentations]
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(model, backend=counter)
    for lengths, right in zip(segmentations, plain, strict=True):
        torch.testing.assert_close(gradients(lengths), right, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == graphs  # of each kind of layer, of the norm
    monkeypatch.setattr(guard, "recording", lambda: True)  # as in a CUDA graph: batches are not checked
    torch.testing.assert_close(gradients(segmentations[0]), plain[0], rtol=1e-4, atol=1e-6)
    assert counter.frame_count == graphs


@pytest.mark.slow
def test_compiled_layers_add_the_loss_of_routers_over_real_tokens(interpreted):
    """Transformers collects scores in hooks, at which the graph of a layer breaks; all layers share the pieces."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = patch(tiny("qwen3_moe", **options), implementation="triton", verify=False)
    state_of(model).guard = DeviceGuard()
    given = [routed(lengths, 64) for lengths in ((5, 19, 33), (41, 3, 4))]
    parameters = list(model.parameters())
    plain = [torch.autograd.grad(mean_loss(model, batch), parameters) for batch in given]
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(model, backend=counter)
    for batch, right in zip(given, plain, strict=True):
        found = torch.autograd.grad(mean_loss(model, batch), parameters)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
        assert 0 < counter.frame_count <= 8
    everything = {**given[0], "attention_mask": torch.ones_like(given[0]["attention_mask"])}
    counted = torch.autograd.grad(mean_loss(model, everything), parameters)
    assert max(float((a - b).abs().max()) for a, b in zip(counted, plain[0], strict=True)) > 1e-4


def routed(lengths: tuple[int, ...], row: int = 128) -> dict:
    """A row as :func:`fixed` makes it, with its padding marked."""
    batch = fixed(lengths, row)
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def test_a_recording_that_fails_says_what_failed_first(stand_in, monkeypatch):
    @contextmanager
    def recording(graph, **options):
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error

    def step(batch):
        if captured.recording:
            activations = torch.ones(4)
            made.append(weakref.ref(activations))
            raise RuntimeError("this kernel waits for the device")

    made = []
    monkeypatch.setattr(torch.cuda, "graph", recording)
    captured = CapturedStep(step, warm_up=1)
    captured(row(1))
    gc.disable()  # memory is there again when the error is gone, not some time after
    try:
        try:
            captured(row(1))
        except RuntimeError as error:
            said = f"{error}, {'held' if made[0]() is not None else 'freed'}"
        assert said == "this kernel waits for the device, held" and made[0]() is None
    finally:
        gc.enable()


def test_compiling_needs_a_packed_batch_before():
    model = tiny("qwen2")
    with pytest.raises(LayoutError, match=r"a patched model that has run a packed batch: call patch\(model\)"):
        compile_layers(model)
    with pytest.raises(LayoutError, match="has run a packed batch"):
        compile_layers(patch(model, verify=False))


def test_recurrent_layers_alone_that_read_lengths_are_not_compiled():
    model = patched("mamba2")
    model(**collate(documents()))
    with pytest.raises(UnsupportedModelError, match="layers of Mamba2ForCausalLM read the lengths of documents"):
        compile_layers(model)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text", "mamba2"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_steps_are_the_steps_to_the_bit(compiled, family):
    for found, right in zip(trained(family, compiled, True), trained(family, compiled, False), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_steps_over_experts_add_the_loss_of_routers(compiled, family):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    (losses, weights), right = trained(family, compiled, True, **options), trained(family, compiled, False, **options)
    assert all(torch.equal(x, y) for x, y in zip((*losses, *weights), (*right[0], *right[1]), strict=True))
    without, _ = trained(family, compiled, False)
    assert all(float(x) > float(y) + 0.1 for x, y in zip(losses, without, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_steps_on_flash_qla_are_those_on_triton(compiled, monkeypatch):
    pytest.importorskip("flash_qla")
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    losses = {}
    for first in ("triton", "flash_qla"):
        times = {"triton": 2.0, "flash_qla": 2.0, first: 1.0}
        monkeypatch.setattr(order, "_recorded", lambda name, packed, times=times: (1_024, times))
        monkeypatch.setattr(scans, "_chosen", {})
        losses[first], _ = trained("qwen3_5_text", compiled, True, **wide)
        assert set(scans._chosen.values()) == {first}
    assert [float(x) for x in losses["flash_qla"]] == pytest.approx([float(x) for x in losses["triton"]], rel=2e-3)


def trained(family: str, compiled: bool, capture: bool, **changes: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The losses and the weights of six steps on a GPU, recorded or not."""
    model = patch(tiny(family, **changes).cuda().bfloat16(), implementation="triton", verify=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    row = routed if changes.get("output_router_logits") else fixed
    with torch.no_grad():
        mean_loss(model, {n: x.cuda() if hasattr(x, "cuda") else x for n, x in row(ROWS[0]).items()})
    if compiled:
        compile_layers(model)

    def one(batch) -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = CapturedStep(one, warm_up=2, enabled=capture)
    batches = ({n: x.cuda() if hasattr(x, "cuda") else x for n, x in row(lengths).items()} for lengths in ROWS)
    losses = [step(batch) for batch in batches]
    assert (step.graph is not None) == capture
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_random_numbers_as_they_were():
    def step(batch: dict[str, Tensor]) -> Tensor:
        dropped = torch.nn.functional.dropout(batch["x"])
        if torch.cuda.is_current_stream_capturing():
            dropped.sum().item()  # waits for the device, which no recording may
        return dropped

    captured = CapturedStep(step, warm_up=1)
    captured({"x": torch.ones(8)})
    expected = torch.cuda.get_rng_state()
    with pytest.raises(RuntimeError):
        captured({"x": torch.ones(8)})
    assert torch.equal(torch.cuda.get_rng_state(), expected)
    assert torch.rand(4, device="cuda").isfinite().all()
