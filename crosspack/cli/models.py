"""``--model`` and ``--tokenizer``: what they name, checked before a framework is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crosspack.encoding.tokenizer import entries
from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import is_hub_name

# The model that is trained from random weights when none is named: small enough for two cores.
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}


def model_source(model: str | None) -> tuple[str | dict[str, Any], str | None]:
    """Returns the source of the model, and the folder or hub name of its tokenizer."""
    if model is None:
        return SMALL_LLAMA, None  # the tokenizer is not known yet
    check_name("--model", model)
    path = Path(model)
    if not path.is_file():
        return model, model
    try:
        config = json.loads(path.read_text())
        config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(f"--model {model}: a file must be a config.json with a model_type") from error
    return config, str(path.parent) if (path.parent / "tokenizer_config.json").is_file() else None


def model_config(model: str) -> Any:
    """Returns the config of a model with all defaults, as an object of transformers.

    Raises:
        PackingError: there is none.
        MissingExtraError: transformers is absent.
    """
    source, _ = model_source(model)
    transformers = require("transformers", extra="hf")
    try:
        if isinstance(source, dict):
            return transformers.AutoConfig.for_model(**source).get_text_config()
        return transformers.AutoConfig.from_pretrained(source).get_text_config()
    except Exception as error:  # files of the folder may hold anything, and so may what reading them raises
        raise PackingError(f"--model {model}: {first_line(error)}") from error


def check_name(option: str, name: str | None) -> None:
    """Raise unless ``name`` is a file, a folder or can be a hub name; before a framework is imported."""
    if name is not None and not Path(name).exists() and not is_hub_name(name):
        raise PackingError(f"{option} {name}: no such folder or file, and not a hub name (`owner/name`)")


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Returns the special tokens of a tokenizer, as a config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": entries(tokenizer), **{name: getattr(tokenizer, name) for name in names}}
