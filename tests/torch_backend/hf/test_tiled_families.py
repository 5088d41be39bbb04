"""Compares the parts of a family's layers that run by tiles with those that the formula of memory counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from packing_core.errors import UnsupportedModelError
from packing_core.training.decoder_sizes import DecoderSizes
from packing_core.training.tiled_families import MLPS, PROJECTIONS
from tests.torch_backend.models import tiny
from tests.torch_backend.vision_models import CASES, vision_model
from torch_backend import patch
from torch_backend.hf.anatomy.data_flow import only_readers, reads_by
from torch_backend.steps.tiled_layers import can_be_tiled, tiled_parts


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
        with pytest.raises(UnsupportedModelError, match=f"the memory of {family} is not known beforehand"):
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


class Layer(nn.Module):
    def plain(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        y = self.norm(x)
        y, _ = self.attention(hidden_states=y, **kwargs)
        z = self.second(x)
        z = self.mlp(z)
        return y + z

    def twice(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.attention(y)
        return y + z

    def conditional(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.training:
            y = self.attention(y)
        return y

    def changed(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.attention(y * 2)
        return y

    def as_a_mask(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.attention(x, attention_mask=y)
        return y


def test_a_norm_has_one_reader_where_nothing_else_mentions_its_result() -> None:
    assert only_readers(Layer.plain) == {"attention": "norm", "mlp": "second"}
    for forward in (Layer.twice, Layer.conditional, Layer.changed, Layer.as_a_mask):
        assert only_readers(forward) == {}


class Attention(nn.Module):
    def plain(self, x: Tensor) -> Tensor:
        shape = x.shape[:-1]
        return self.q(x).view(shape) + self.k(x) + self.v(x)

    def otherwise(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x) + x.mean()

    def twice(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x) + self.v(x)

    def by_its_weight(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x) + self.v.weight

    def changed(self, x: Tensor) -> Tensor:
        x = x + 1
        return self.q(x) + self.k(x) + self.v(x)

    def shared(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


def test_an_input_is_read_by_projections_where_nothing_else_reads_it() -> None:
    assert reads_by(Attention.plain, ("q", "k", "v"))
    for forward in (
        Attention.otherwise,
        Attention.twice,
        Attention.by_its_weight,
        Attention.changed,
        Attention.shared,
    ):
        assert not reads_by(forward, ("q", "k", "v"))
