"""Liger's and Unsloth's kernels in a model: compiled layers run the plain operations, everything else the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.gemma import modeling_gemma
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from packing_core.errors import UnsupportedModelError
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.steps.test_packed_step import assert_same, built
from tests.torch_backend.trainers.test_trainer import llama
from torch_backend import explain, make_train_step, patch
from torch_backend.hf.foreign_kernels import (
    has_ligers_forward,
    own_forward,
    replaced_modules,
    unknown_part,
    without_kernels,
)
from torch_backend.hf.override import override, rebound
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.eligibility import why_not_compiled


class Reached(Exception):
    """A kernel of Liger ran."""


def kernel(name: str, library: str = "liger_kernel.transformers", probed: Any = None) -> Callable[..., Any]:
    """A function that is Liger's by its module, and raises; ``probed`` runs where no gradients are wanted."""

    def forward(*args: Any, **named: Any) -> Any:
        if probed is None or torch.is_grad_enabled():
            raise Reached(name)
        return probed(*args, **named)

    forward.__module__, forward.__name__ = library, name
    return forward


def of_library(base: type[nn.Module], name: str, library: str = "liger_kernel.transformers") -> type[nn.Module]:
    return type(name, (base,), {"__module__": library, "forward": kernel(name, library)})


def norms(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


def on_instances(model: Any, forward: bool = True) -> None:
    """Sets forwards on the modules of a model and replaces names of its file, as Liger does."""
    for module in (*norms(model), *(layer.mlp for layer in model.model.layers)):
        own = kernel(f"Liger{type(module).__name__}.forward", probed=type(module).forward)
        module.__dict__["forward"] = MethodType(own, module)
    modeling_llama.apply_rotary_pos_emb = kernel("liger_rotary_pos_emb")
    modeling_llama.LlamaRMSNorm = of_library(modeling_llama.LlamaRMSNorm, "LigerRMSNorm")
    if forward:
        model.forward = MethodType(kernel("lce_forward"), model)


def test_a_forward_of_liger_is_taken_away_where_nothing_wraps_it() -> None:
    """Accelerate's wrapper stands in ``forward``, and keeps in ``_original_forward`` what it wraps."""
    model = llama()
    model.forward = MethodType(kernel("lce_forward"), model)
    assert has_ligers_forward(model)
    with own_forward(model):
        assert "forward" not in model.__dict__
    assert "forward" in model.__dict__
    model._original_forward = model.forward
    assert not has_ligers_forward(model)


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    before, forward = dict(vars(modeling_llama)), modeling_llama.LlamaForCausalLM.forward
    yield
    vars(modeling_llama).update(before)
    modeling_llama.LlamaForCausalLM.forward = forward


def batch() -> dict[str, Any]:
    given = collate(documents((5, 19, 33)), capacity=64)
    return given | {
        name: torch.where(given[name] < 0, given[name], given[name] % 64) for name in ("input_ids", "labels")
    }


def trained(model: Any) -> tuple[list[float], dict[str, str]]:
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [float(step(batch())["loss"]) for _ in range(3)], step.parts


def test_compiled_layers_run_the_forward_of_the_class(graphs: SimpleNamespace) -> None:
    graphs.model = patch(llama(), verify=False).train()
    right, _ = trained(graphs.model)
    model = llama()
    on_instances(model)
    graphs.model = patch(model, verify=False).train()
    found, parts = trained(graphs.model)
    assert found == right
    assert parts["layers"] == (
        "compiled, input_layernorm, mlp, norm, post_attention_layernorm by plain operations in place of Liger's "
        "kernels, which torch.compile runs wrongly"
    )
    assert parts["loss"] == "without logits, in place of Liger's forward of the model"
    with pytest.raises(Reached, match="LigerLlamaRMSNorm"):  # outside of the step
        model.model(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_layers_without_kernels_share_one_graph() -> None:
    torch._dynamo.reset()
    model = llama()
    on_instances(model)
    liger = of_library(modeling_llama.LlamaRMSNorm, "LigerRMSNorm")
    for layer in model.model.layers:  # as in a model that was made after Liger came
        layer.input_layernorm.__dict__.pop("forward")
        layer.input_layernorm.__class__ = liger
    x = torch.randn(1, 7, 32)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with without_kernels(replaced_modules([model.model])):
        for layer in model.model.layers:
            for part in (layer.input_layernorm, layer.mlp):
                part.compile(backend=backend, fullgraph=True, dynamic=False)
                part(x)
    torch._dynamo.reset()
    assert len(graphs) == 2, "one of the norms, one of the MLPs"


def test_a_model_that_was_there_before_is_compiled_as_it_is(graphs: SimpleNamespace) -> None:
    earlier = patch(llama(), verify=False).train()
    on_instances(llama())
    graphs.model = earlier
    assert trained(earlier)[1]["layers"] == "compiled"


_dispatch = kernel("_swiglu_dispatch")


def _swiglu_forward(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(_dispatch(self.gate_proj(x), self.up_proj(x)))


def test_functions_of_a_forward_that_gives_way_do_not_matter() -> None:
    """A model that was made after Liger replaced the class of its MLP."""
    members = {"__module__": "liger_kernel.transformers", "forward": _swiglu_forward}
    model, kind = llama(), type("LigerSwiGLUMLP", (nn.Module,), members)
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
    assert unknown_part(model.model.layers) is None
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 32)
    with without_kernels(replaced_modules(model.model.layers)):
        torch.testing.assert_close(mlp(x), llama().model.layers[0].mlp(x))
    with pytest.raises(Reached, match="_swiglu_dispatch"):
        mlp(x)


def test_unsloths_class_gives_way_to_the_one_it_derives_from() -> None:
    model = llama()
    for norm in norms(model):
        norm.__class__ = of_library(type(norm), "Unsloth_LlamaRMSNorm", "unsloth.kernels.rms_layernorm")
    x = torch.randn(2, 32)
    found = replaced_modules([model])
    assert len(found) == 5
    with without_kernels(found):
        torch.testing.assert_close(model.model.norm(x), llama().model.norm(x), rtol=0, atol=0)
    with pytest.raises(Reached):
        model.model.norm(x)


@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer", "LlamaModel", "LlamaForCausalLM"])
def test_a_model_whose_classes_run_unsloths_forwards_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As FastLanguageModel leaves the classes of transformers, for every model of the process."""
    model, kind = llama(), getattr(modeling_llama, name)
    monkeypatch.setattr(kind, "forward", kernel(f"{name}_fast_forward", "unsloth.models.llama"))
    before = set(vars(model))
    with pytest.raises(UnsupportedModelError, match=f"{name} runs Unsloth's forward, which computes"):
        patch(model, verify=False)
    assert set(vars(model)) == before


def passed_on(layer: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def test_a_forward_behind_an_override_of_ours_gives_way_too() -> None:
    """Experts are overridden, and Liger may have come before."""
    norm, right = llama().model.norm, llama().model.norm
    norm.__dict__["forward"] = MethodType(kernel("LigerRMSNorm.forward"), norm)
    override(norm, passed_on)
    x = torch.randn(2, 32)
    with without_kernels(replaced_modules([norm])):
        torch.testing.assert_close(norm(x), right(x), rtol=0, atol=0)
    with pytest.raises(Reached):
        norm(x)


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "autocast"])
@pytest.mark.parametrize("forward", [True, False], ids=["with its loss", "without"])
def test_a_trainer_that_applies_it_trains_as_without(
    graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], forward: bool
) -> None:
    """It is applied when training begins, after enable_packing, and accelerate wraps the model's forward then."""
    plain = built(tmp_path / "plain", False, **options)
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", lambda model, config: on_instances(model, forward))
    fast = built(tmp_path / "fast", True, use_liger_kernel=True, **options)
    graphs.model = fast.model
    assert_same(fast, plain, tolerance=1e-2 if options else 1e-6)
    notes = "\n".join(explain(fast).notes)
    assert "in place of Liger's kernels" in notes
    assert ("in place of Liger's forward of the model" in notes) is forward


@pytest.mark.parametrize("patched_before", [True, False])
def test_a_class_whose_forward_was_replaced_makes_its_loss_as_its_file_says(patched_before: bool) -> None:
    right = causal_lm_loss(patch(llama(), verify=False).train(), batch())
    model = patch(llama(), verify=False) if patched_before else llama()
    modeling_llama.LlamaForCausalLM.forward = kernel("lce_forward")
    model = patch(model, verify=False)
    assert causal_lm_loss(model.train(), batch()) == right
    with pytest.raises(Reached):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_packed_calls_rotate_without_ligers_function() -> None:
    right = causal_lm_loss(patch(llama(), verify=False).train(), batch())[0]
    own = modeling_llama.LlamaAttention
    modeling_llama.LlamaAttention = type("LlamaAttention", (own,), {"forward": copied(own.forward)})
    torch.testing.assert_close(causal_lm_loss(patch(llama(), verify=False).train(), batch())[0], right)


def test_packed_calls_of_gpt_oss_rotate_without_ligers_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its angles are half as wide, and its file's own rotation is one that patch leaves in place otherwise."""
    right = causal_lm_loss(patch(tiny("gpt_oss"), verify=False).train(), collate(documents((5, 19, 33))))[0]
    monkeypatch.setattr(modeling_gpt_oss, "apply_rotary_pos_emb", kernel("liger_rotary_pos_emb_gpt_oss"))
    model = patch(tiny("gpt_oss"), verify=False).train()
    assert unknown_part(model.model.layers) is None
    found = causal_lm_loss(model, collate(documents((5, 19, 33))))[0]
    torch.testing.assert_close(found, right)


def copied(forward: Any) -> Any:
    """A forward of a process in which Liger came first, in whose file the rotation is Liger's."""
    return rebound(forward, {"apply_rotary_pos_emb": kernel("liger_rotary_pos_emb")})


def test_what_has_no_plain_form_is_not_compiled_and_named() -> None:
    model = patch(llama(), verify=False)
    assert "Liger" not in (why_not_compiled(model) or "")
    model.model.layers[0].mlp.__class__ = of_library(nn.Module, "LigerTiledMLP")
    assert why_not_compiled(model) == (
        "Liger's LigerTiledMLP stands in them, which torch.compile may run wrongly: leave it out"
    )


def test_a_function_without_a_plain_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", kernel("liger_attention"))
    assert "Liger's liger_attention" not in (why_not_compiled(patch(model, verify=False)) or "")
    assert "Liger's eager_attention_forward stands in them" in (why_not_compiled(model) or "")


# -- Liger's own classes ---------------------------------------------------------------------------------------------


def twin(kind: str, width: int = 32) -> tuple[nn.Module, nn.Module]:
    """A module of Liger, which a modeling file makes after Liger was applied, and the file's own."""
    liger = pytest.importorskip("liger_kernel.transformers", reason="unsupported here: liger-kernel is no dependency")
    config = {"hidden_size": width, "intermediate_size": 48}
    made: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
        "RMS norm": lambda: (liger.LigerRMSNorm(width, 1e-5), modeling_llama.LlamaRMSNorm(width, 1e-5)),
        "Gemma's RMS norm": lambda: (
            liger.rms_norm.LigerRMSNormForGemma(width, 1e-5),
            modeling_gemma.GemmaRMSNorm(width, 1e-5),
        ),
        "layer norm": lambda: (liger.LigerLayerNorm(width, 1e-5), nn.LayerNorm(width, 1e-5)),
        "gated MLP": lambda: (
            liger.LigerSwiGLUMLP(transformers.LlamaConfig(**config)),
            modeling_llama.LlamaMLP(transformers.LlamaConfig(**config)),
        ),
        "joined MLP": lambda: (
            liger.LigerPhi3SwiGLUMLP(transformers.Phi3Config(**config)),
            modeling_phi3.Phi3MLP(transformers.Phi3Config(**config)),
        ),
        "scaled MLP": lambda: (
            liger.swiglu.LigerFalconH1SwiGLUMLP(transformers.FalconH1Config(**config, mlp_multipliers=[0.5, 3.0])),
            modeling_falcon_h1.FalconH1MLP(transformers.FalconH1Config(**config, mlp_multipliers=[0.5, 3.0])),
        ),
        "HunYuan's MLP": lambda: (
            liger.swiglu.LigerHunyuanV1SwiGLUMLP(transformers.LlamaConfig(**config)),
            modeling_llama.LlamaMLP(transformers.LlamaConfig(**config)),
        ),
        "squared ReLU": lambda: (
            liger.relu_squared.LigerReLUSquared(),
            transformers.activations.ReLUSquaredActivation(),
        ),
        "MLP with GELU": lambda: (
            liger.LigerGEGLUMLP(transformers.GemmaConfig(**config)),
            modeling_gemma.GemmaMLP(transformers.GemmaConfig(**config)),
        ),
    }
    return made[kind]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "RMS norm",
        "Gemma's RMS norm",
        "layer norm",
        "gated MLP",
        "joined MLP",
        "MLP with GELU",
        "scaled MLP",
        "HunYuan's MLP",
        "squared ReLU",
    ],
)
def test_ligers_classes_compute_what_the_replaced_class_does(kind: str, dtype: torch.dtype) -> None:
    ligers, own = (module.to(dtype) for module in twin(kind))
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    ligers.load_state_dict(own.state_dict())
    x = torch.randn(3, 7, 32, dtype=dtype)
    found = replaced_modules([ligers])
    assert list(found) == [ligers] and unknown_part([ligers]) is None
    with without_kernels(found):
        torch.testing.assert_close(ligers(x), own(x), rtol=0, atol=0)
    assert type(ligers).__module__.startswith("liger_kernel.")
