"""One list says what of a model draws random numbers: prefixes, recomputation and graphs go by it alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from packing_core.errors import UnsupportedModelError
from tests.torch_backend.collate.test_shared_prefixes import answers
from tests.torch_backend.models import tiny
from torch_backend import PackedCollator, patch
from torch_backend.hf.anatomy.random_draws import find_draw
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.eligibility import level_inside
from torch_backend.steps.memory import set_level

NOISY = {
    "mixtral": {"router_jitter_noise": 0.1},
    "minimax": {"router_jitter_noise": 0.1},
    "phimoe": {"input_jitter_noise": 0.1, "router_jitter_noise": 0.0},
}


@pytest.mark.parametrize("family", NOISY)
def test_noise_of_a_router_is_refused_in_prefixes_and_is_not_recomputed_in_a_graph(family: str) -> None:
    model = patch(tiny(family, **NOISY[family]), verify=False).train()
    with pytest.raises(UnsupportedModelError, match=r"noise \(.*jitter_noise=0.1\) is on, and documents that share a"):
        causal_lm_loss(model, PackedCollator(share_prefix=True)(answers()))
    set_level(model, "full")
    assert level_inside(model) == "none"


def test_a_setting_counts_where_it_is_changed_on_the_module_alone() -> None:
    model = tiny("mixtral").train()
    assert find_draw(model) is None
    model.model.layers[1].mlp.jitter_noise = 0.25
    assert find_draw(model) == "noise (model.layers.1.mlp.jitter_noise=0.25)"
    model.model.layers[1].mlp.eval()
    assert find_draw(model) is None and find_draw(model, ever=True) is not None
    assert find_draw(model.eval()) is None


def test_code_that_draws_without_a_setting_always_draws() -> None:
    """PhiMoE's router draws experts in training, whatever its settings are."""
    model = tiny("phimoe", router_jitter_noise=0.0, input_jitter_noise=0.0)
    assert find_draw(model.train()) == "noise (model.layers.1.mlp.router: sparsemixer)"
    assert find_draw(model.eval()) is None


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drawn(x)

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x)


def test_a_module_of_ones_own_that_draws_in_a_method_is_seen() -> None:
    model = tiny("llama").train()
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, Noisy())
    assert find_draw(model) == "noise (model.layers.0.mlp.down_proj.1: drawn)"


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "mamba2", "qwen3_next", "deepseek_v3"]
)
def test_families_without_noise_draw_nothing(family: str) -> None:
    assert find_draw(tiny(family).train()) is None


@pytest.mark.parametrize(("family", "setting"), [("opt", "layerdrop"), ("llama", "attention_dropout")])
def test_dropout_is_found_by_the_same_rule(family: str, setting: str) -> None:
    drawn = find_draw(tiny(family, **{setting: 0.5}).train())
    assert drawn is not None and drawn.startswith("dropout (") and f"{setting}=0.5" in drawn
