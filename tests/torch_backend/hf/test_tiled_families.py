"""Parts of layers that run by tiles, as the formula of memory counts them; what was changed runs whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from packing_core.errors import UnsupportedModelError
from packing_core.training.decoder_sizes import MLPS, PROJECTIONS, DecoderSizes
from tests.torch_backend.hf.forwards import written
from tests.torch_backend.hf.test_tiled_layers import gradients
from tests.torch_backend.hf.test_tiled_layers import short as short
from tests.torch_backend.models import tiny
from tests.torch_backend.trainers.test_trainer import llama
from tests.torch_backend.vision_models import CASES, vision_model
from torch_backend import patch, unpatch
from torch_backend.hf.anatomy.additions import why_changed
from torch_backend.hf.anatomy.data_flow import only_readers, reads_by
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.steps.memory import set_level
from torch_backend.steps.tiled_layers import can_be_tiled, describe_tiles, tiled, tiled_modules, tiled_parts


def made(family: str) -> nn.Module:
    config = CONFIG_MAPPING[family](num_hidden_layers=2, vocab_size=256, pad_token_id=0)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def parts_told(config: Any) -> set[str]:
    """The parts that the formula counts by tiles, from a config alone."""
    return set().union(*(kind.tiles for kind in DecoderSizes.read(config).kinds))


BEHIND_TOWERS = {"gemma4_text", "glm4v_moe_text"} | {f"{x}_text" for x in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
BEHIND_TOWERS |= {"qwen3_vl_moe_text"}
WITHOUT_FORMULA = {"hrm_text", "hunyuan_v1_moe"}
BY_TILES = sorted((MLPS | PROJECTIONS) - BEHIND_TOWERS - WITHOUT_FORMULA)
WHOLE = ("arcee", "apertus", "falcon_h1", "llama4_text", "nanochat", "persimmon", "phi3", "seed_oss", "starcoder2")


def test_the_formula_is_not_known_of_families_that_it_would_count_wrong() -> None:
    for family in WITHOUT_FORMULA:
        with pytest.raises(UnsupportedModelError, match=f"how much {family} keeps of a step is not known"):
            parts_told(tiny(family).config)


@pytest.mark.parametrize("families", [BY_TILES, WHOLE], ids=["by tiles", "whole"])
def test_the_formula_counts_what_models_of_a_family_compute_by_tiles(families: Sequence[str]) -> None:
    found, told = {}, {}
    for family in families:
        model = patch(tiny(family), verify=False)
        found[family], told[family] = tiled_parts(model), parts_told(model.config)
    assert told == found
    assert all(
        ("mlp" in parts) is (family not in WHOLE) for family, parts in found.items() if family in MLPS | {*WHOLE}
    )


NO_GATE = ("apertus", "arcee", "bloom", "codegen", "gpt_neox", "gptj", "jais2", "mpt", "nanochat", "nemotron")
NO_GATE += ("persimmon", "phi", "starcoder2", "xglm")


@pytest.mark.parametrize("families", [NO_GATE, ("glm", "llama", "phi3", "seed_oss")], ids=["no gate", "gate"])
def test_the_formula_knows_which_mlps_have_a_gate(families: Sequence[str]) -> None:
    for family in families:
        model = tiny(family)
        matrices = sum(x.numel() for x in model.parameters() if x.ndim > 1)
        assert DecoderSizes.read(model.config).parameters == pytest.approx(matrices, rel=0.01), family


def test_the_formula_counts_decoders_behind_a_tower_without_the_tower() -> None:
    found, told, families = {}, {}, set()
    for case in CASES.keys() - {"lfm2_vl"}:  # whose memory is not known
        model = patch(vision_model(case), verify=False)
        found[case], told[case] = tiled_parts(model), parts_told(model.config)
        families.add(model.config.get_text_config().model_type)
    assert told == found
    assert families >= BEHIND_TOWERS


def test_norms_behind_attention_and_in_front_of_two_parts_stay_whole() -> None:
    gemma = made("gemma2")
    norms = {id(part.norm) for part in can_be_tiled(gemma).values()}
    assert len(norms) == 4 and not any(
        id(m) in norms for name, m in gemma.named_modules() if name.endswith(("post_attention_layernorm", ".norm"))
    )
    assert {part.norm for part in can_be_tiled(made("cohere")).values()} == {None}, (
        "attention and the MLP read one norm"
    )


def test_a_norm_has_one_reader_where_nothing_else_mentions_its_result() -> None:
    read = written(
        "y = self.norm(x)",
        "y, _ = self.attention(hidden_states=y, **kwargs)",
        "z = self.second(x)",
        "z = self.mlp(z)",
        "return y + z",
    )
    assert only_readers(read) == {"attention": "norm", "mlp": "second"}
    for statements in (
        ("z = self.attention(y)", "return y + z"),
        ("if self.training:", "    y = self.attention(y)", "return y"),
        ("y = self.attention(y * 2)", "return y"),
        ("y = self.attention(x, attention_mask=y)", "return y"),
    ):
        assert only_readers(written("y = self.norm(x)", *statements)) == {}, statements


def test_an_input_is_read_by_projections_where_nothing_else_reads_it() -> None:
    read = written("shape = x.shape[:-1]", "return self.q(x).view(shape) + self.k(x) + self.v(x)")
    assert reads_by(read, ("q", "k", "v"))
    for statements in (
        ("return self.q(x) + self.k(x) + self.v(x) + x.mean()",),
        ("return self.q(x) + self.k(x) + self.v(x) + self.v(x)",),
        ("return self.q(x) + self.k(x) + self.v(x) + self.v.weight",),
        ("x = x + 1", "return self.q(x) + self.k(x) + self.v(x)"),
        ("return self.q(x) + self.k(x)",),
    ):
        assert not reads_by(written(*statements), ("q", "k", "v")), statements


class SiLU(nn.Module):
    """Is not what its name says."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def scales(module: nn.Module, inputs: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def watches(module: nn.Module, inputs: Any, output: Any = None) -> None:
    torch.as_tensor(inputs[0] if inputs else 0).float().norm()


def scales_gradient(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(None if x is None else x * 2 for x in given)


def on_the_way_back(module: nn.Module) -> None:
    module.register_full_backward_hook(scales_gradient)


def of_softplus(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())


def subclass(module: nn.Module, **attributes: Any) -> None:
    module.__class__ = type(
        type(module).__name__, (type(module),), {"__module__": type(module).__module__, **attributes}
    )


def of_swapped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def negative(self: Any, x: Tensor) -> Tensor:
    return -self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scales(self, args, forward(self, *args, **kwargs))

    return scaled


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight)


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an MLP of another formula": ("mlp", lambda m: subclass(m, forward=of_swapped)),
    "an MLP with a sign": ("mlp", lambda m: subclass(m, forward=negative)),
    "an MLP under a decorator": ("mlp", lambda m: subclass(m, forward=decorated(type(m).forward))),
    "an MLP whose calls do more": ("mlp", lambda m: subclass(m, __call__=lambda self, x: 2 * self.forward(x))),
    "a hook that scales": ("mlp", lambda m: m.register_forward_hook(scales)),
    "a hook that scales inside": ("mlp.up_proj", lambda m: m.register_forward_hook(scales)),
    "a hook on the activation": ("mlp.act_fn", lambda m: m.register_forward_hook(scales)),
    "a hook that watches an MLP": ("mlp", lambda m: m.register_forward_pre_hook(watches)),
    "a hook that watches a projection": ("self_attn.q_proj", lambda m: m.register_forward_hook(watches)),
    "a hook that scales queries": ("self_attn.q_proj", lambda m: m.register_forward_hook(scales)),
    "a hook that watches a norm": ("input_layernorm", lambda m: m.register_forward_hook(watches)),
    "a hook on the way back": ("mlp.gate_proj", on_the_way_back),
    "a hook before the way back": ("mlp.up_proj", lambda m: m.register_full_backward_pre_hook(lambda _, dy: dy)),
    "a hook on the way back of keys": ("self_attn.k_proj", on_the_way_back),
    "a norm's hook on the way back": ("post_attention_layernorm", on_the_way_back),
    "weight_norm": ("mlp.up_proj", weight_norm),
    "weight_norm of queries": ("self_attn.q_proj", parametrizations.weight_norm),
    "a parametrisation of a norm": ("input_layernorm", of_softplus),
    "prune": ("mlp.down_proj", lambda m: prune.random_unstructured(m, "weight", 0.5)),
    "an activation of another class": ("mlp", lambda m: setattr(m, "act_fn", SiLU())),
    "an attribute of the activation": ("mlp.act_fn", lambda m: setattr(m, "forward", torch.tanh)),
    "another class of projections": ("mlp.gate_proj", lambda m: subclass(m, forward=doubled)),
    "a forward of an instance": ("self_attn.v_proj", lambda m: setattr(m, "forward", MethodType(doubled, m))),
}  # fmt: skip


def compared(model: Any) -> None:
    """Gradients and what hooks see are those of a step without tiles."""
    exact = gradients(model)
    set_level(model, "full")
    with tiled(tiled_modules(model, 128)):
        torch.testing.assert_close(gradients(model), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_was_changed_runs_whole(short: None, change: str) -> None:
    model = llama()
    place, apply = CHANGES[change]
    apply(model.model.layers[0].get_submodule(place))
    model = patch(model, verify=False).train()
    found = can_be_tiled(model)
    assert sum((module in found) + (part.norm is not None) for module, part in found.items()) < 8
    compared(model)


@pytest.mark.parametrize("place", ["mlp", "self_attn.q_proj", "post_attention_layernorm"])
def test_a_hook_on_all_modules_sees_them_all(short: None, place: str) -> None:
    model = patch(llama(), verify=False).train()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        compared(model)
    finally:
        handle.remove()
    assert model.model.layers[0].get_submodule(place) in seen


def test_a_module_of_a_library_is_unchanged_until_somebody_changes_it() -> None:
    module: Any = nn.Linear(2, 2)
    assert why_changed(module) is None
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert why_changed(module) == "a hook stands on all modules"
    module.forward = lambda x: x
    assert why_changed(module) == "somebody set a forward on it"


def with_adapters(**options: Any) -> Any:
    torch.manual_seed(0)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=names, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return patch(model, verify=False).train()


VARIANTS = {
    "DoRA": lambda: {"use_dora": True},
    "KaSA": lambda: {"kasa_config": peft.KasaConfig()},
    "VeLoRA": lambda: {"velora_config": peft.VeloraConfig(num_groups=2)},
    "MiCA": lambda: {"init_lora_weights": "mica"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_adapters_run_as_they_are(short: None, variant: str) -> None:
    model = with_adapters(**VARIANTS[variant]())
    compared(model)


def test_adapters_that_draw_random_numbers_run_as_they_are(short: None) -> None:
    model = with_adapters(monteclora_config=peft.MontecloraConfig())
    assert not can_be_tiled(model)


@pytest.mark.parametrize("part", ["lora_A.default", "lora_B.default", "base_layer"])
def test_a_hook_on_a_part_of_an_adapter_is_run(short: None, part: str) -> None:
    model = unpatch(with_adapters())
    for place in ("mlp.up_proj", "self_attn.q_proj"):
        causal_lm(model).model.layers[0].get_submodule(f"{place}.{part}").register_forward_hook(scales)
    assert len(can_be_tiled(patch(model, verify=False))) == 2
    compared(model)


def test_a_change_after_a_verdict_is_seen(short: None) -> None:
    """A verdict on what a part computes does not outlive an exchange of what is inside."""
    model = patch(tiny("gemma3_text", vocab_size=64), verify=False).train()
    mlp = model.model.layers[0].mlp
    assert mlp in can_be_tiled(model)
    mlp.act_fn.act = torch.tanh
    assert mlp not in can_be_tiled(model)
    compared(model)


def test_what_runs_whole_is_named_with_the_reason(short: None) -> None:
    model = patch(llama(), verify=False).train()
    model.model.layers[1].mlp.register_forward_hook(scales)
    set_level(model, "full")
    assert describe_tiles(model, 128, lambda _: False) == (
        "3 parts of layers, 24 tokens at a time; whole: model.layers.1.mlp, because a hook stands on it (scales)"
    )
    assert describe_tiles(model, 128, lambda _: True) == "none, because a row of 128 tokens fits at this level without"
    assert describe_tiles(model, 32, lambda _: False) is None
    set_level(model, "none")
    assert describe_tiles(model, 128, lambda _: False) is None
