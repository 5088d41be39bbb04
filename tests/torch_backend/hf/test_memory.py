"""Levels of memory: what layers keep changes, and what they compute does not."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend import graphs as stand_ins
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.steps.test_packed_step import built
from tests.torch_backend.steps.test_vision_step import batches_of
from torch_backend import enable_packing, make_train_step, patch
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.eligibility import plain_layers, why_not_compiled, why_not_recomputed
from torch_backend.steps.memory import (
    LEVELS,
    hold_level,
    is_attention,
    level_layers,
    level_of,
    recomputing_inside,
    set_level,
)

RECOMPUTING = [level for level in LEVELS if level != "none"]
FAMILIES = ["qwen2", "qwen3_5_text", "gpt_oss"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return stand_ins.stand_in(monkeypatch.setattr)


def batch(**options: int) -> dict[str, Any]:
    return collate(documents((5, 19, 33, 71)), capacity=128, **options)


def gradients(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    total, weight = causal_lm_loss(model, given)
    return list(torch.autograd.grad(total / weight, [p for p in model.parameters() if p.requires_grad]))


def kept(model: Any, given: dict[str, Any]) -> int:
    """Bytes that the forward keeps for the backward."""
    found = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found += x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        causal_lm_loss(model, given)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_layers_give_the_same_gradients_and_recompute_more(family: str) -> None:
    model = patch(tiny(family, intermediate_size=160), verify=False).train()  # more than twice the width of 64
    exact = gradients(model, batch())
    sizes, work = {}, {}
    for level in (*RECOMPUTING, "none"):
        set_level(model, level)
        sizes[level] = kept(model, batch())
        with FlopCounterMode(display=False) as counted:
            torch.testing.assert_close(gradients(model, batch()), exact, rtol=1e-4, atol=1e-6)
        work[level] = counted.get_total_flops()
    assert sizes["none"] > sizes["full"]
    assert work["none"] < work["selective"] < work["attention"] <= work["full"]  # attention on the CPU is not counted


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients_and_keep_less(interpreted: None) -> None:
    model = patch(tiny("qwen3_5_text"), implementation="triton", verify=False).train()
    state_of(model).guard = DeviceGuard()  # boundaries on the CPU would be read
    given = {name: value for name, value in batch(max_seqlen=128, bucket=16).items() if name != "packed_lengths"}
    exact, sizes = gradients(model, given), {}
    for level in ("none", "selective", "attention", "full"):
        torch._dynamo.reset()
        set_level(model, level)
        names: list[list[str]] = []
        compile_layers(model, backend=recording(names), memory=level)
        with recomputing_inside(level_layers(model)):
            torch.testing.assert_close(gradients(model, given), exact, rtol=1e-4, atol=1e-6)
        assert all(layer.gradient_checkpointing for layer in level_layers(model))
        layers = sorted(names, key=len)[1:]  # the last norm keeps least
        sizes[level] = sum(map(len, layers))
        if level == "full":  # its output, which is the next layer's input; an empty tensor of the hybrid's scan
            assert all(len(each) <= 2 for each in layers)
    assert sizes["none"] > sizes["selective"] > sizes["attention"] > sizes["full"]


def recording(names: list[list[str]]) -> Any:
    """A backend that runs as it is, and notes what each forward returns and keeps beside its inputs."""

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        results = list(graph.graph.nodes)[-1].args[0]
        names.append([x.name for x in results if isinstance(x, torch.fx.Node) and x.op != "placeholder"])
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )


@pytest.mark.parametrize(
    ("operation", "kept"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (torch.nn.functional.scaled_dot_product_attention, True),
        (torch.ops.higher_order.flex_attention, True),
        (SimpleNamespace(__name__="attention_forward.default", namespace="crosspack"), True),
        (SimpleNamespace(__name__="flash4_forward.default", namespace="crosspack"), True),
        (SimpleNamespace(__name__="fwd.default", namespace="flash_attn_3"), True),
        (SimpleNamespace(__name__="linear_attention_scan.default", namespace="crosspack"), False),
        (SimpleNamespace(__name__="gated_delta_rule.default", namespace="crosspack"), False),
        (torch.ops.aten.mm.default, False),
        (torch.nn.functional.linear, False),
        ("L__self___self_attn_q_proj", False),  # a module of a graph
    ],
    ids=str,
)
def test_the_level_of_attention_keeps_that_over_keys_alone(operation: Any, kept: bool) -> None:
    assert is_attention(operation) is kept


def test_a_level_is_read_from_the_model_however_it_was_set() -> None:
    model = patch(tiny("llama"), verify=False)
    assert level_of(model) == "none"
    for level in LEVELS:
        set_level(model, level)
        assert level_of(model) == level
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert level_of(model) == "full"
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(offload=True)
        assert level_of(model) == "offload"


def test_a_choice_of_operations_by_trl_is_selective_and_gives_way_to_a_level() -> None:
    wrap = pytest.importorskip("trl.models.selective_activation_checkpointing")
    model = patch(tiny("llama"), verify=False)
    wrap.enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable()
    assert level_of(model) == "selective"
    set_level(model, "full")
    assert level_of(model) == "full"
    model.gradient_checkpointing_enable()
    assert level_of(model) == "selective"


@pytest.mark.parametrize("level", LEVELS)
def test_a_trainer_that_switches_checkpointing_off_for_a_while_gets_its_level_back(level: Any) -> None:
    switched_off = pytest.importorskip("trl.models.utils").disable_gradient_checkpointing
    model = patch(tiny("llama"), verify=False)
    hold_level(model, "full")
    hold_level(model, level)
    with switched_off(model, {"use_reentrant": True}):
        assert level_of(model) == "none"
    assert level_of(copy.deepcopy(model)) == level_of(model) == level


@pytest.mark.parametrize("level", RECOMPUTING)
def test_torch_compile_takes_the_contexts_of_a_level(level: Any) -> None:
    """Layers of preference trainers, and all layers with dropout, are compiled with the checkpoint inside."""
    model = tiny("llama")
    set_level(model, level)
    made = level_layers(model)[0]._gradient_checkpointing_func.keywords.get("context_fn")
    assert (made is None) is (level == "full")
    assert made is None or all(isinstance(mode, TorchDispatchMode) for mode in made())


def test_a_level_that_changes_between_steps_acts_in_the_next_one(graphs: SimpleNamespace) -> None:
    model = graphs.model = patch(tiny("llama"), verify=False).train()
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for level in ("none", "none", "full", "full", "selective", "none"):
        set_level(model, level)  # type: ignore[arg-type]
        step(batch())
        found.append(step.parts["layers"])
        assert level_of(model) == level
    full, selective = 'compiled, memory="full"', 'compiled, memory="selective"'
    assert found == ["compiled", "compiled", full, full, selective, "compiled"]


def test_explain_names_the_level_of_layers_that_are_not_compiled() -> None:
    model = patch(tiny("llama"), verify=False).train()
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory="offload")
    plain = "not compiled: the model computes on cpu"
    step(batch())
    assert step.parts["layers"] == f'{plain}, memory="offload", with the inputs of layers on the device'
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(every_n_layers=2, offload=True)
        assert plain_layers(model, "why") == 'not compiled: why, memory="offload" in 1 of 2 layers'


def test_the_tower_in_front_of_compiled_layers_recomputes_by_itself(graphs: SimpleNamespace) -> None:
    model, (_, image, *_) = batches_of("qwen2_5_vl", implementation="sdpa")
    graphs.model, flags = model, {}
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory="full")
    step(image)
    for name, layer in model.named_modules():
        if isinstance(layer, DecoderLayer):
            note = partial(lambda name, layer, _: flags.update({name: layer.gradient_checkpointing}), name)
            layer.register_forward_pre_hook(note)
    graphs_of_text = step.parts["layers"]
    step(image)
    assert graphs_of_text == 'compiled, memory="full"' and len(flags) == 4
    assert all(flag is ("visual" in name) for name, flag in flags.items())


@pytest.mark.parametrize("level", RECOMPUTING)
def test_a_step_that_recomputes_is_recorded(graphs: SimpleNamespace, level: Any) -> None:
    graphs.model, right = patch(tiny("qwen2"), verify=False).train(), patch(tiny("qwen2"), verify=False).train()
    for model, options in ((graphs.model, {"memory": level}), (right, {"capture": False, "compile": False})):
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for _ in range(5):
            step(batch())
        if model is graphs.model:
            assert step.parts["layers"] == f'compiled, memory="{level}"' and step.parts["graph"] == "CUDA graph"
    assert graphs.replayed
    assert level_of(graphs.model) == level  # evaluation and generation run as they are set
    for found, wanted in zip(graphs.model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dropout", "compile", "reason"),
    [
        (0.1, "auto", "dropout or noise in layers that recompute reads the random state"),
        (0.0, False, "gradient checkpointing of layers that are not compiled reads the random state"),
    ],
)
def test_what_of_recomputing_forbids_a_graph(
    graphs: SimpleNamespace, dropout: float, compile: Any, reason: str
) -> None:
    model = graphs.model = patch(tiny("llama", attention_dropout=dropout), verify=False).train()
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), memory="full", compile=compile)
    step(batch())
    assert step.parts["graph"] == f"no CUDA graph: {reason}"


def test_a_trainer_gets_a_level_in_place_of_its_checkpointing(tmp_path: Path) -> None:
    trainer = built(tmp_path, False, activation_checkpointing=True)
    enable_packing(trainer, verify=False, memory="selective")
    trainer.train()
    assert level_of(trainer.model) == "selective"
    enable_packing(trainer, verify=False, memory="none")
    assert level_of(trainer.model) == "none" and not trainer.args.activation_checkpointing


def test_levels_that_a_model_cannot_have_are_refused_by_name() -> None:
    model = patch(tiny("llama"), verify=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        PackingError, match="memory='most' is no level: pass one of 'none', 'selective', 'attention', 'full'"
    ):
        make_train_step(model, optimizer, memory="most")  # type: ignore[arg-type]
    model.supports_gradient_checkpointing = False
    with pytest.raises(UnsupportedError, match='LlamaForCausalLM cannot recompute .* memory="full" is not possible'):
        make_train_step(model, optimizer, memory="full")


@pytest.mark.parametrize("family", ["gemma3n_text", "falcon"])
def test_what_the_selective_level_keeps_does_not_change_where_layers_change_it_in_place(family: str) -> None:
    model = patch(tiny(family), verify=False).train()
    exact = gradients(model, batch())
    set_level(model, "selective")
    torch.testing.assert_close(gradients(model, batch()), exact, rtol=1e-4, atol=1e-6)


def test_reentrant_checkpoints_are_refused_where_layers_share_keys_and_values() -> None:
    model = patch(tiny("gemma3n_text"), verify=False).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with torch.no_grad():
        causal_lm_loss(model, batch())
    with pytest.raises(UnsupportedModelError, match="Gemma3nTextModel read keys and values of earlier ones"):
        causal_lm_loss(model, batch())


@pytest.mark.parametrize("setting", ["attention_dropout", "router_jitter_noise"])
def test_layers_that_draw_random_numbers_do_not_recompute_inside_of_a_graph(setting: str) -> None:
    model = patch(tiny("mixtral", **{setting: 0.1}), verify=False).train()
    set_level(model, "full")
    reason = "dropout or noise in layers that recompute reads the random state"
    assert why_not_recomputed(model, compiled=True) == reason
    setattr(model.config, setting, 0.0)
    assert why_not_recomputed(model, compiled=True) == reason, "layers keep their own copy"
    for module in model.modules():
        module.__dict__.update((name, 0.0) for name in ("attention_dropout", "jitter_noise") if hasattr(module, name))
    assert why_not_recomputed(model, compiled=True) is None


def test_checkpoint_wrappers_around_layers_are_named_and_leave_no_choice_of_a_level(graphs: SimpleNamespace) -> None:
    model = graphs.model = tiny("llama")
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, DecoderLayer))
    patch(model, verify=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_train_step(model, optimizer)
    step(batch())
    assert step.parts["layers"] == "compiled, recomputed by checkpoint wrappers"
    assert step.parts["graph"] == "no CUDA graph: checkpoint wrappers around layers read the random state"
    with pytest.raises(UnsupportedError, match='LlamaForCausalLM and recompute them whatever memory="none" says'):
        make_train_step(model, optimizer, memory="none")


def test_layers_that_clip_weights_in_a_forward_are_compiled_only_where_they_keep_everything() -> None:
    model = patch(tiny("gemma3n_text", altup_coef_clip=120.0), verify=False).train()
    assert "clip weights" not in (why_not_compiled(model) or "")
    set_level(model, "full")
    assert "its layers clip weights in each forward" in (why_not_compiled(model) or "")
