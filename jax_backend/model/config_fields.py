"""The fields of a ``config.json``, whatever holds them, with the defaults of their family.

A folder, a file, a config object or a dictionary -> :class:`Fields`. The defaults are those that the family's config
class in transformers documents, written down here because JAX needs no transformers; a test compares them with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from packing_core.errors import PackingError

_PLAIN: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": None,  # hidden_size // num_attention_heads
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": None,  # those of the family
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_key_value_heads": None,  # as many as num_attention_heads
    "original_max_position_embeddings": None,  # max_position_embeddings
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_LONG, _QWEN_HEADS, _QWEN_LENGTH = 131_072, {"num_key_value_heads": 32}, {"max_position_embeddings": 32_768}
_WINDOW = {"sliding_window": 4096}
_QWEN = _QWEN_HEADS | _QWEN_LENGTH | _WINDOW | {"use_sliding_window": False, "max_window_layers": 28}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False}
_ROUTED = {"router_aux_loss_coef": 0.001}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": _LONG}
_OLMO = {"rms_norm_eps": 1e-5, "pad_token_id": 1}
_GEMMA = _WINDOW | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_HYBRID = _QWEN_LENGTH | {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

# model_type -> what its class has in place of, or beside, the plain defaults
_OWN: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "mistral": _MISTRAL | _WINDOW,
    "ministral": _MISTRAL | _WINDOW,
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32_000,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO | _WINDOW | {"rope_theta": 500_000.0},
    "gemma2": _GEMMA
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
    "gemma3_text": _GEMMA
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": _LONG,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
    "mixtral": _MISTRAL | _ROUTED | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "qwen2_moe": _QWEN | _SPARSE | _ROUTED | {"num_key_value_heads": 16, "qkv_bias": True},
    "qwen3_moe": _QWEN | _SPARSE | _ROUTED | {"num_key_value_heads": 4},
    "gpt_oss": _ROUTED
    | {
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": _LONG,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "qwen3_next": _HYBRID | _SPARSE | _ROUTED | {"norm_topk_prob": True, "num_key_value_heads": 2},
    "qwen3_5_text": _HYBRID | {"num_key_value_heads": 4},
}


class Fields(dict[str, Any]):
    """A ``config.json``. ``fields[name]`` fills in the default of its family for a field that it lacks, so that in the
    end it needs none."""

    def default(self, name: str) -> Any:
        """Returns what the family's class has for the field; None if that depends on others."""
        return (_PLAIN | _OWN.get(self["model_type"], {}))[name]

    def __missing__(self, name: str) -> Any:
        try:
            value = self.default(name)
        except KeyError:
            raise PackingError(
                f"the config of model_type {self['model_type']!r} lacks {name}, which has no default: add it"
            ) from None
        if value is not None:
            self[name] = value
        return value


def read_fields(source: Any, families: Container[str]) -> Fields:
    """Returns the fields of a text model's config.

    Args:
        source: a folder with ``config.json`` or such a file, a config object of transformers, or a mapping. Of a
            model of several parts that is in none of the ``families`` it is the ``text_config``.

    Raises:
        PackingError: it is none of these, or the file is missing or no JSON.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        file = path / "config.json" if path.suffix != ".json" else path
        if not file.is_file():
            raise PackingError(f"{path} holds no config.json: give a folder written by save_pretrained")
        try:
            source = json.loads(file.read_text())
        except ValueError as error:
            raise PackingError(f"{file} is not JSON ({error}): write it with save_pretrained") from error
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    if not isinstance(source, Mapping):
        raise PackingError(
            f"a config must be a dictionary, a config object of transformers, or a folder with config.json; got "
            f"{type(source).__name__}"
        )
    inner = source.get("text_config")
    if inner is None or source.get("model_type") in families:
        return Fields(source)
    tied = {name: source[name] for name in ("tie_word_embeddings",) if name in source}
    return Fields(tied | read_fields(inner, families))
