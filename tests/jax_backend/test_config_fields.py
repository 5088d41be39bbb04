"""A config that leaves fields out is the one that its family's class in transformers makes of it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jax_backend.model.decoder_config import FAMILIES, DecoderConfig
from packing_core.errors import PackingError
from tests.jax_backend.models import CONFIGS

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}


def classes_own(fields: dict[str, Any]) -> dict[str, Any]:
    """Writes out all fields as the family's class reads these."""
    return CONFIG_MAPPING[fields["model_type"]].from_dict(deepcopy(dict(fields))).to_dict()


def brief(family: str) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_local_experts": 6} | EXPERTS
    own = {name: size for name, size in experts.items() if hasattr(CONFIG_MAPPING[family](), name)}
    return {"model_type": family, **SIZES, **own}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_alone_give_the_decoder_of_the_familys_class_and_are_written_with_every_default(family: str) -> None:
    config = DecoderConfig.from_hf(brief(family))
    assert config == DecoderConfig.from_hf(classes_own(brief(family)))
    assert DecoderConfig.from_hf(classes_own(config.to_hf())) == config
    extra = {"use_sliding_window": True, "output_router_logits": True, "max_window_layers": 2, "pad_token_id": None}
    assert DecoderConfig.from_hf(brief(family) | extra) == DecoderConfig.from_hf(classes_own(brief(family) | extra))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_field_that_is_left_out_is_the_classes_or_is_named(name: str) -> None:
    whole = CONFIGS[name]().to_dict()
    for field in set(whole) - {"model_type", "rope_parameters"}:
        rest = {key: value for key, value in whole.items() if key != field}
        if field in brief(whole["model_type"]):
            with pytest.raises(PackingError, match=f"lacks (num_experts|{field}), which has no default: add it"):
                DecoderConfig.from_hf(rest)
        else:
            assert DecoderConfig.from_hf(rest) == DecoderConfig.from_hf(classes_own(rest)), field


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 77.0},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=["base", "nested share", "share"],
)
def test_rotary_fields_act_where_the_family_reads_them(family: str, rope: dict[str, Any]) -> None:
    config = DecoderConfig.from_hf(brief(family) | rope)
    assert config == DecoderConfig.from_hf(classes_own(brief(family) | rope))
    partial = family in ("phi3", "qwen3_next", "qwen3_5_text") and "rope_theta" not in rope
    usual = 0.25 if family in ("qwen3_next", "qwen3_5_text") else 1.0
    assert config.rope.channels == config.head_dim * (0.5 if partial else usual)


def test_a_config_is_read_from_an_object_a_file_a_folder_and_a_model_of_several_parts(tmp_path: Path) -> None:
    text = CONFIGS["gemma3"]()
    wanted = DecoderConfig.from_hf(text.to_dict())
    whole = CONFIG_MAPPING["gemma3"](text_config=text)
    whole.save_pretrained(tmp_path)
    for source in (text, whole, whole.to_dict(), tmp_path, str(tmp_path / "config.json")):
        assert DecoderConfig.from_hf(source) == wanted
    outer = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": brief("gemma3_text")}
    assert not DecoderConfig.from_hf(outer).tie_word_embeddings


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(brief("llama"))[:-5])
    for source, reason in (
        (tmp_path, "config.json is not JSON"),
        (tmp_path / "nowhere", "holds no config.json: give a folder"),
        (None, "a config must be a dictionary, a config object of transformers, or a folder .*; got NoneType"),
        ([1], "got list"),
        ({"model_type": "gemma3", "text_config": 3}, "got int"),
    ):
        with pytest.raises(PackingError, match=reason):
            DecoderConfig.from_hf(source)
