"""Compares the parts of a family's layers that run by tiles with those that the formula of memory counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from packing_core.training.decoder_sizes import _PROJECTIONS_BY_TILES
from torch_backend.hf.anatomy.data_flow import only_readers, reads_by
from torch_backend.steps.tiled_layers import can_be_tiled, tiled_parts

OTHERS = ("cohere", "glm4_moe", "olmo2", "phi", "qwen2_moe", "qwen3_5_text", "starcoder2")


def made(family: str) -> nn.Module:
    config = CONFIG_MAPPING[family](num_hidden_layers=2, vocab_size=256, pad_token_id=0)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("family", [*_PROJECTIONS_BY_TILES, *OTHERS])
def test_the_formula_names_the_families_whose_projections_run_by_tiles(family: str) -> None:
    assert ("projections" in tiled_parts(made(family))) is (family in _PROJECTIONS_BY_TILES)


def test_norms_behind_attention_and_in_front_of_two_parts_stay_whole() -> None:
    gemma = made("gemma2")
    norms = {id(norm) for norm in can_be_tiled(gemma).values()}
    assert len(norms) == 4 and not any(
        id(m) in norms for name, m in gemma.named_modules() if name.endswith(("post_attention_layernorm", ".norm"))
    )
    assert set(can_be_tiled(made("cohere")).values()) == {None}, "attention and the MLP read one norm"


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
