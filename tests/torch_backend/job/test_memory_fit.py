"""``memory="auto"``, and what is said of rows that are too long, on devices of stand-in sizes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from packing_core.errors import CapacityError, PackingError, UnsupportedError
from packing_core.training import memory_model
from packing_core.training.memory_model import LEVELS, USABLE
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.hf.test_tiled_layers import short as short
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.steps.test_packed_step import adapted, built
from tests.torch_backend.trainers.test_trainer import llama
from torch_backend import enable_packing, explain, make_train_step, patch
from torch_backend.steps import memory_fit
from torch_backend.steps.fast_backward import Gradients
from torch_backend.steps.memory import level_of, set_level
from torch_backend.steps.memory_fit import StepMemory

WIDE = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}


def batch(capacity: int = 128) -> dict[str, Any]:
    return collate(documents((5, 19, 33, 71)), capacity=capacity)


@pytest.fixture
def model(graphs: SimpleNamespace) -> Any:
    """Layers count as compiled, which nothing on the CPU is."""
    graphs.model = patch(tiny("qwen2", **WIDE), verify=False).train()
    return graphs.model


def give(monkeypatch: pytest.MonkeyPatch, device: float, host: int | None = None) -> None:
    monkeypatch.setattr(memory_fit, "device_bytes", lambda _: int(device) + 1)
    monkeypatch.setattr(memory_fit, "host_bytes", lambda: host)


def memory(model: Any) -> Any:
    """Returns that of a step of several microbatches, from whose second one all gradients are there."""
    return StepMemory(model, torch.optim.AdamW(model.parameters()), accumulates=True).formula()


def step_of(model: Any, **options: Any) -> Any:
    return make_train_step(model, torch.optim.AdamW(model.parameters()), **options)


def test_weights_gradients_and_states_are_counted(model: Any) -> None:
    size = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    adam, plain = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())
    assert StepMemory(model, adam).formula().fixed == 4 * size + buffers
    assert StepMemory(model, plain).formula().fixed == 2 * size + buffers
    step = step_of(model)
    step(batch())
    assert StepMemory(model, step.optimizer).formula().fixed == 4 * size + buffers, "as they are"


@pytest.mark.parametrize(
    ("name", "about", "bytes_of_a_number"),
    [
        ("AdamW", {"args": SimpleNamespace(optim_bits=8)}, 2),  # as transformers makes adamw_8bit
        ("PagedAdamW", {"args": SimpleNamespace(optim_bits=32), "is_paged": True}, 0),
        ("AdamW", {"args": SimpleNamespace(optim_bits=32), "__module__": "bitsandbytes.optim.adamw"}, 8),
        ("Lion", {}, 2),
        ("AdamW8bit", {}, 2),
        ("RMSprop", {}, 2),
    ],
)
def test_states_are_expected_by_the_kind_of_an_optimizer(
    name: str, about: dict[str, Any], bytes_of_a_number: int
) -> None:
    model = patch(llama(), verify=False).bfloat16()
    plain = StepMemory(model, torch.optim.SGD(model.parameters())).formula().fixed
    made = type(name, (), about)()
    expected = bytes_of_a_number * sum(p.numel() for p in model.parameters())
    assert StepMemory(model, made).formula().fixed - plain == expected


def test_states_of_adafactor_and_adapters_are_those_that_are_made() -> None:
    model = patch(llama(), verify=False)
    optimizer = transformers.Adafactor(model.parameters(), lr=0.1, relative_step=False, scale_parameter=False)
    before = StepMemory(model, optimizer).formula().fixed
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert StepMemory(model, optimizer).formula().fixed == before < StepMemory(model).formula().fixed
    plain, lora = StepMemory(llama()).formula(), StepMemory(adapted()).formula()
    assert lora.kept["none"] - plain.kept["none"] == 2 * 4 * 4, "two layers, an adapter of rank 4, float32"
    assert lora.fixed < plain.fixed


@pytest.mark.parametrize("level", LEVELS)
def test_the_fastest_level_that_fits_is_taken_and_printed(
    model: Any, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, memory(model).bytes(level, 128) / USABLE)
    step = step_of(model, memory="auto")
    step([batch(), batch()])
    assert level_of(model) == level
    assert f'memory="auto" takes "{level}": 128 tokens need ' in capsys.readouterr().err


def test_the_first_batch_through_compiled_layers_is_announced(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of(model)
    for _ in range(3):
        step(batch())
    lines = [line for line in capsys.readouterr().err.splitlines() if "first batch through compiled layers" in line]
    assert len(lines) == 2 and lines[0].endswith("...") and lines[1].endswith(" s")


def test_a_longer_row_takes_another_level_and_a_shorter_one_does_not(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, memory(model).bytes("none", 128) / USABLE)
    step = step_of(model, memory="auto")
    levels = []
    for capacity in (128, 256, 128):
        step([batch(capacity), batch(capacity)])
        levels.append(level_of(model))
    assert levels[0] == "none" and levels[1] == levels[2] != "none"


def test_a_second_microbatch_finds_gradients_and_may_take_another_level(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = StepMemory(model, torch.optim.AdamW(model.parameters())).formula()
    assert alone.bytes("none", 128) < memory(model).bytes("none", 128)
    give(monkeypatch, alone.bytes("none", 128) / USABLE)
    step = step_of(model, memory="auto")
    for batches in (batch(), [batch(), batch()]):
        step(batches)
        assert (level_of(model) == "none") == isinstance(batches, dict)


@pytest.mark.parametrize(
    ("share", "words"), [(1.06, "fits at this level without"), (1.0, "12 parts of layers, 24 tokens at a time")]
)
def test_a_long_row_runs_by_tiles_where_it_does_not_surely_fit_without(
    model: Any, short: None, monkeypatch: pytest.MonkeyPatch, share: float, words: str
) -> None:
    set_level(model, "full")
    give(monkeypatch, share * memory(model).bytes("full", 128, tiles=False) / USABLE)
    step = step_of(model, memory="full")
    step(batch())
    assert ("by tiles" if "parts" in words else "whole") == ("by tiles" if step._gradients.tiles[1] else "whole")
    (note,) = (note for note in explain(step).notes if note.startswith("tiles of the step"))
    assert words in note


def test_a_row_that_fits_at_no_level_is_refused_before_the_first_step(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, memory(model).bytes("offload", 100) / USABLE)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CapacityError, match='128 tokens fits .* GiB at no level .* has 100, at memory="offload"'):
        step_of(model, memory="auto")([batch(), batch()])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_row_too_long_for_the_level_that_was_named_is_announced_before_the_first_step(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_model, "_WORKSPACES", 0)  # a hundred times what this model takes
    give(monkeypatch, memory(model).bytes("full", 128) / USABLE)
    step_of(model, memory="full")([batch(), batch()])
    assert "128 tokens" not in capsys.readouterr().err
    step = step_of(model, memory="none")
    for _ in range(2):
        step([batch(), batch()])
    lines = [line for line in capsys.readouterr().err.splitlines() if "a row of 128 tokens needs about" in line]
    assert len(lines) == 1 and lines[0].endswith('are there: memory="full" fits')


def test_a_row_too_long_for_any_level_is_refused_whatever_level_was_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_model, "_WORKSPACES", 0)
    give(monkeypatch, memory(model).bytes("offload", 128) / 1.1)
    with pytest.raises(CapacityError, match="a row of 128 tokens fits .* GiB at no level of memory: the longest that"):
        step_of(model, memory="none")([batch(), batch()])
    give(monkeypatch, memory(model).fixed / 2)
    with pytest.raises(CapacityError, match=r"no shorter one does: weights, gradients and optimizer take \d+\.\d GiB"):
        step_of(model, memory="auto")([batch(), batch()])


def fail(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_an_out_of_memory_error_names_the_level_that_fits(
    model: Any, monkeypatch: pytest.MonkeyPatch, graphs: SimpleNamespace, tmp_path: Path
) -> None:
    step = step_of(model, memory="none")
    step._gradients.prepared, step._gradients.backward = True, fail
    give(monkeypatch, memory(model).bytes("full", 128) / USABLE)
    said = r'CUDA out of memory\. .*Crosspack: a row of 128 tokens ran at memory="none", and fits at memory="'
    with pytest.raises(torch.OutOfMemoryError, match=said + "full"):
        step([batch(), batch()])
    give(monkeypatch, memory(model).bytes("offload", 100) / USABLE)
    with pytest.raises(torch.OutOfMemoryError, match='the longest that fits has 100 tokens, at memory="offload"'):
        step([batch(), batch()])
    trainer = built(tmp_path, True, gradient_accumulation_steps=2)
    graphs.model = trainer.model
    monkeypatch.setattr(Gradients, "__call__", fail)
    expected = StepMemory(trainer.model, torch.optim.SGD(trainer.model.parameters()), accumulates=True).formula()
    give(monkeypatch, expected.bytes("full", 80) / USABLE)
    with pytest.raises(torch.OutOfMemoryError, match=r'memory\. Crosspack: .* ran at memory="none", and fits at'):
        trainer.train()


def test_nothing_is_promised_of_layers_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny("qwen2", **WIDE), verify=False).train()
    assert StepMemory(model).choose(128)[0] == "none", "off CUDA nothing is asked"
    monkeypatch.setattr(Gradients, "__call__", fail)
    give(monkeypatch, memory(model).bytes("selective", 128) / USABLE)
    ran = 'a row of 128 tokens ran at memory="{}", and layers are not compiled (the model computes on cpu): {}'
    for level, way in (("none", 'memory="full" needs less'), ("full", "a shorter one needs less")):
        with pytest.raises(torch.OutOfMemoryError, match=re.escape(ran.format(level, way))):
            step_of(model, memory=level)(batch())
    set_level(model, "none")
    give(monkeypatch, 1)
    level, reason = StepMemory(model).choose(128)
    assert level == "full" and "layers are not compiled (the model computes on cpu)" in reason


def test_layers_with_dropout_do_not_offload_and_are_not_expected_to(
    graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_model, "_WORKSPACES", 0)
    model = graphs.model = patch(tiny("qwen2", attention_dropout=0.1, **WIDE), verify=False).train()
    give(monkeypatch, memory(model).bytes("offload", 128) / USABLE)
    with pytest.raises(CapacityError, match='no level of memory: the longest that does has .* at memory="full"'):
        step_of(model, memory="auto")([batch(), batch()])
    give(monkeypatch, 0.99 * memory(model).bytes("full", 128) / USABLE)
    step = step_of(model, memory="offload")
    step([batch(), batch()])
    assert "no level surely fits" in capsys.readouterr().err
    assert step.parts["layers"] == 'compiled, memory="offload", with the inputs of layers on the device'


def test_a_step_lets_layers_share_inputs_where_the_host_is_small_and_refuses_before_it_runs(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = 128 * StepMemory(model).formula().hidden
    monkeypatch.setattr(memory_fit, "host_bytes", lambda: 3 * one)
    step = step_of(model, memory="offload")
    step(batch())
    assert step._gradients.host.group == 2
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(PackingError, match=r'memory="offload" keeps .* GiB of a row of 512 tokens on the host'):
        step(batch(512))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_trainer_takes_the_fastest_level_that_fits(
    graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = built(tmp_path, True, gradient_accumulation_steps=2)
    enable_packing(trainer, capacity=40, verify=False, memory="auto")
    graphs.model = trainer.model
    expected = StepMemory(trainer.model, torch.optim.SGD(trainer.model.parameters()), accumulates=True).formula()
    give(monkeypatch, expected.bytes("full", 80) / USABLE)
    trainer.train()
    assert level_of(trainer.model) == "full"
    assert any("memory of the step: the longest row" in note for note in explain(trainer).notes)


def test_auto_is_refused_where_no_level_is_possible_or_the_step_is_not_ours(tmp_path: Path) -> None:
    trainer = built(tmp_path, True)
    with pytest.raises(UnsupportedError, match='memory="auto" follows from rows that the fast step trains'):
        enable_packing(trainer, memory="auto", fast=False)
    model = patch(tiny("qwen2"), verify=False).train()
    monkey = type(model)
    monkey.supports_gradient_checkpointing, before = False, monkey.supports_gradient_checkpointing
    try:
        with pytest.raises(UnsupportedError, match='memory="auto" is not possible'):
            step_of(model, memory="auto")
    finally:
        monkey.supports_gradient_checkpointing = before
    set_level(model, "none")


@pytest.mark.parametrize(("fraction", "there"), [(1.0, 70), (0.5, 50), (0.3, 30)])
def test_a_process_counts_on_no_more_than_its_fraction_of_a_device(
    monkeypatch: pytest.MonkeyPatch, fraction: float, there: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (45, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 25)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    assert memory_fit.device_bytes(torch.device("cuda")) == there
