"""Experts of patched models run on our kernels, exactly, padding routed to none; adapters as they are; undone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny, with_mask
from torch_backend.hf.anatomy.expert_layouts import ExpertsLayout, layout_of, weights_of
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.hf.edits.packed_experts import reasons_against
from torch_backend.hf.entry import run_with
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.patched import Patched
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.ops import experts as ops
from torch_backend.ops.experts import dispatch
from torch_backend.segments import PackedMetadata
from torch_backend.steps import cuda_graph
from torch_backend.steps.eligibility import why_not_compiled

# every layout and gate, mixers beside experts, and decoder layers that pass a mask on
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "granitemoehybrid", "qwen3_next", "mixtral")
LENGTHS = (7, 3, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_alone_are_the_same_and_our_kernels_ran(family: str) -> None:
    model, docs = tiny(family), documents(LENGTHS)
    want = alone(model, docs)
    names = list(find_experts(model.model))
    assert names
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs, with_mask(collate(docs, capacity=16))), want, 2e-5)
    layers = {x.layer: x for x in torch_backend.explain(model).layers if x.route == "experts"}
    assert list(layers) == names and {x.serves for x in layers.values()} == {"plain"}
    assert "experts of" in layers[names[0]].request


def test_unpacked_calls_and_unpatch_keep_what_was_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    model, docs = tiny("qwen3_moe"), documents(LENGTHS)
    before = alone(model, docs)
    torch_backend.patch(model, verify=False)
    ran: list[int] = []
    monkeypatch.setattr("torch_backend.hf.experts.experts", lambda x, *_, **__: ran.append(1) or x)
    after = alone(model, docs)
    assert not ran and all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
    classes = [type(m) for m in model.modules()]
    torch_backend.unpatch(model)
    fresh = [type(m) for m in tiny("qwen3_moe").modules()]
    assert classes != fresh and [type(m) for m in model.modules()] == fresh
    assert not any("_crosspack_experts" in m.__dict__ for m in model.modules())


def test_padding_is_routed_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    model, docs = torch_backend.patch(tiny("qwen3_moe"), verify=False), documents(LENGTHS)
    chosen: list[torch.Tensor] = []
    original = ops.experts

    def spy(x: Any, indices: Any, *others: Any, **options: Any) -> Any:
        chosen.append(indices)
        return original(x, indices, *others, **options)

    monkeypatch.setattr("torch_backend.hf.experts.experts", spy)
    features = [{"input_ids": d} for d in docs]
    batch = torch_backend.PackedCollator(model, capacity=16)(features)
    model(**batch)
    real = batch["attention_mask"].flatten().bool()
    assert not real.all() and chosen
    count = model.config.num_experts
    assert all((x[~real] == count).all() and (x[real] < count).all() for x in chosen)


def test_tokens_that_ranks_exchanged_are_not_taken_for_those_of_the_row() -> None:
    model = tiny("qwen3_moe")
    model.set_experts_implementation("crosspack")
    module = next(iter(find_experts(model).values()))
    forward = PackedForward(PackedMetadata.from_lengths((16,)), (1, 16))
    forward.real = torch.arange(16) < 12
    given = torch.randn(16, 64), torch.zeros(16, 2, dtype=torch.int64), torch.ones(16, 2)
    zeros = [bool((run_with("layer", forward, module, *given)[12:] == 0).all())]
    module._is_expert_parallel = True
    zeros.append(bool((run_with("layer", forward, module, *given)[12:] == 0).all()))
    assert zeros == [True, False]


def test_checkpointed_layers_route_padding_to_no_expert_again() -> None:
    model, docs = tiny("qwen3_moe"), documents(LENGTHS)
    want = alone(model, docs)
    torch_backend.patch(model, verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(packed(model, docs, with_mask(collate(docs, capacity=16))), want)


def test_a_patched_model_is_pickled_with_its_experts() -> None:
    model, docs = torch_backend.patch(tiny("gpt_oss"), verify=False), documents(LENGTHS)
    batch = with_mask(collate(docs, capacity=16))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_compiled_layer_keeps_experts_in_its_graph(family: str) -> None:
    model = torch_backend.patch(tiny(family), verify=False)
    forward = PackedForward(PackedMetadata.from_lengths((7, 9)), (1, 16))
    forward.real = torch.arange(16) < 12
    x = torch.randn(1, 16, model.config.hidden_size)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = run_with("layer", forward, model.model.layers[0].mlp, x)
        return (y[0] if isinstance(y, tuple) else y).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    parameters = list(model.model.layers[0].mlp.parameters())
    found, right = (torch.autograd.grad(f(x), parameters) for f in (compiled, step))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["triton", "grouped_mm"])
@pytest.mark.parametrize(
    ("family", "width"), [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")]
)
def test_a_step_over_experts_waits_for_nothing(
    family: str, width: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MANY_TOKENS", 0 if first == "grouped_mm" else 2**40)
    model = tiny(family, **{width: 64}).cuda().bfloat16()
    torch_backend.patch(model, implementation="triton", verify=False)
    given = with_mask(collate(documents((30, 50, 40)), capacity=128, max_seqlen=128, bucket=16))
    batch = {name: x.cuda() if torch.is_tensor(x) else x for name, x in given.items() if name != "packed_lengths"}

    def step() -> None:
        total, weight = causal_lm_loss(model, batch)
        (total / weight).backward()

    step()  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layers = [x for x in torch_backend.explain(model).layers if x.route == "experts"]
    assert {x.serves for x in layers} == {first}


def normed(module: nn.Module) -> None:
    module.has_post_expert_norm = True


def odd_gate(module: nn.Module) -> None:
    module._apply_gate = lambda z: z.chunk(2, dim=-1)[0].sin()


def two_dtypes(module: nn.Module) -> None:
    module.down_proj.data = module.down_proj.data.double()


def quantised(module: nn.Module) -> None:
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.data.to(torch.uint8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (normed, "a norm follows each expert"),
        (odd_gate, "what stands between its products is no activation that the kernels know"),
        (two_dtypes, "its weights are of two dtypes, torch.float32 and torch.float64"),
        (quantised, r"its weights are quantised \(Parameter of uint8\)"),
    ],
)
def test_what_the_kernels_do_not_run_keeps_its_implementation_and_says_why(change: Any, reason: str) -> None:
    model = tiny("qwen3_moe")
    module = next(iter(find_experts(model).values()))
    change(module)
    found = layout_of(module)
    assert isinstance(found, str)
    model.set_experts_implementation("crosspack")
    with pytest.raises(UnsupportedModelError, match=f'crosspack" does not run Qwen3MoeExperts, because {reason}'):
        module(torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
    assert list(reasons_against(model.model).values()) == [found]


def adapted(family: str, std: float | None = None, **options: Any) -> Any:
    """A tiny model with adapters on its experts, whose weights are drawn anew with a deviation of ``std``."""
    peft = pytest.importorskip("peft")
    model = tiny(family)
    for module in find_experts(model).values() if std is not None else ():
        for weight in module.parameters():
            nn.init.normal_(weight, std=std)
    experts = next(iter(find_experts(model).values()))
    layout = layout_of(experts)
    assert isinstance(layout, ExpertsLayout)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=[], target_parameters=[f"experts.{layout.up}", "experts.down_proj"], **options
    )
    found = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return found.train()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_adapters_of_experts_are_exact_and_never_added_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, docs = adapted(family), documents(LENGTHS)
    want = alone(model, docs)
    assert any("lora_A" in name for name in want.gradients)
    torch_backend.patch(model, verify=False)

    def added_up(*_: Any, **__: Any) -> None:
        raise AssertionError("the adapter was added to the weights of all experts")

    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            monkeypatch.setattr(type(module), "_activate_lora", added_up)
    assert_same(packed(model, docs, with_mask(collate(docs, capacity=16))), want, 2e-5)
    layers = [x for x in torch_backend.explain(model).layers if x.route == "experts"]
    assert all("adapters of rank 3" in x.request for x in layers)


def test_disabled_and_merged_adapters_are_left_to_peft() -> None:
    model, docs = torch_backend.patch(adapted("qwen3_moe"), verify=False), documents(LENGTHS)
    batch = with_mask(collate(docs, capacity=16))
    whole = packed(model, docs, batch)
    with model.disable_adapter(), torch.no_grad():
        base = model(**batch).logits
    assert not torch.allclose(base, torch.cat(whole.logits).new_zeros(()) + model(**batch).logits)
    model.merge_adapter()
    with torch.no_grad():
        merged = model(**batch)
    assert torch.allclose(merged.loss, whole.loss, rtol=1e-5)


def test_adapters_that_are_on_elsewhere_alone_change_no_experts() -> None:
    model = torch_backend.patch(adapted("qwen3_moe"), verify=False)
    batch = with_mask(collate(documents(LENGTHS), capacity=16))
    with torch.no_grad():
        with_them = model(**batch).logits
        with model.disable_adapter():
            base = model(**batch).logits
        for module in model.modules():
            if type(module).__name__ == "ParamWrapper":
                module._active_adapter = ["of another part"]
        found = model(**batch).logits
    assert torch.allclose(found, base, atol=1e-6) and not torch.allclose(found, with_them, atol=1e-3)


class Sixteenths(nn.Module):
    """Makes a weight from integers, as weights of 4 bits are made."""

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.to(torch.float32) / 16


def in_few_bits(model: Any) -> tuple[Any, Any]:
    """The model with experts that are stored as integers and made in every call, and a copy that holds what is made."""
    held = copy.deepcopy(model)
    for module, copied in zip(find_experts(model).values(), find_experts(held).values(), strict=True):
        for name in (layout_of(module).up, "down_proj"):
            stored = (getattr(module, name).detach() * 16).round().to(torch.int8)
            setattr(module, name, nn.Parameter(stored, requires_grad=False))
            parametrize.register_parametrization(module, name, Sixteenths(), unsafe=True)
            getattr(copied, name).data = Sixteenths()(stored)
    return model, held


def saved(model: Any, batch: dict[str, Any]) -> set[torch.Size]:
    """The shapes of all that a forward keeps for its backward."""
    shapes: set[torch.Size] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.add(x.shape) or x, lambda x: x):
        model(**batch)
    return shapes


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_weights_that_are_made_in_every_call_are_exact_and_none_is_kept(family: str) -> None:
    (model, held), docs = in_few_bits(adapted(family, std=1.0)), documents(LENGTHS)
    want = alone(held, docs)
    assert any("experts" in name and "lora_A" in name for name in want.gradients)
    batch = with_mask(collate(docs, capacity=16))
    for each in (model, held):
        torch_backend.patch(each, verify=False)
        assert_same(packed(each, docs, batch), want, 2e-5)
    assert_same(alone(model, docs), want, 2e-5)  # PEFT's own forward of such weights raises in the backward
    module = next(iter(find_experts(model).values()))
    weights = {weight.shape for weight in weights_of(module, layout_of(module))}
    assert weights <= saved(held, batch) and not weights & saved(model, batch)


def test_layers_whose_weights_are_made_in_every_call_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_backend.patch(in_few_bits(tiny("qwen3_moe"))[0], verify=False)
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    monkeypatch.setattr(Patched, "layers_need_lengths", False)
    assert why_not_compiled(model) == "the weights of its experts are made in every call, from 4 bits for example"
    assert why_not_compiled(torch_backend.patch(tiny("qwen3_moe"), verify=False)) is None
