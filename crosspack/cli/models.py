"""``--model`` and ``--tokenizer``: what they name, checked before a framework is imported."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from crosspack.encoding.tokenizer import entries, vocabulary_digest
from crosspack.reading import Records
from crosspack.reading.files import is_url, remote
from packing_core.errors import PackingError, naming
from packing_core.extras import require
from packing_core.training.job import is_hub_name

DIGEST = "tokenizer_digest"  # key of the manifest of packed rows
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


def tokenizer_source(model: str | None, tokenizer: str | None) -> str | None:
    """Returns the folder or hub name of a command's tokenizer: that of --tokenizer, or else of --model.

    None of a model without one: a tokenizer is trained on the data.
    """
    check_name("--tokenizer", tokenizer)
    check_name("--model", model)
    if tokenizer is not None or model is None or not Path(model).is_file():
        return tokenizer or model
    folder = Path(model).parent
    return str(folder) if (folder / "tokenizer_config.json").is_file() else None


def model_source(model: str | None) -> str | dict[str, Any]:
    """Returns the folder or hub name of a model, or the contents of its config."""
    if model is None:
        return SMALL_LLAMA  # the tokenizer is not known yet
    check_name("--model", model)
    path = Path(model)
    if not path.is_file():
        return model
    try:
        config = json.loads(path.read_text())
        config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(f"--model {model}: a file must be a config.json with a model_type") from error
    return dict(config)


def model_config(model: str) -> Any:
    """Returns the config of a model with all defaults, as an object of transformers.

    Raises:
        PackingError: there is none.
        MissingExtraError: transformers is absent.
    """
    source = model_source(model)
    transformers = require("transformers", extra="hf")
    with naming(f"--model {model}"):  # files of the folder may hold anything, and so may what reading them raises
        if isinstance(source, dict):
            return transformers.AutoConfig.for_model(**source).get_text_config()
        return transformers.AutoConfig.from_pretrained(source).get_text_config()


def may_take_media(model: str | None) -> bool:
    """Returns whether a model has an encoder of images or audio, by its config; False where there is none."""
    if model is None or Path(model).is_file():
        return False
    path = Path(model) / "config.json"
    if not Path(model).exists():
        with suppress(PackingError), naming(f"--model {model}"):  # raised again where the model is loaded
            path = Path(require("huggingface_hub", extra="hf").hf_hub_download(model, "config.json"))
    return path.is_file() and re.search(rb'"(vision|audio|encoder)_config"', path.read_bytes()) is not None


def check_name(option: str, name: str | None) -> None:
    """Raise unless ``name`` is a file, a folder or can be a hub name; before a framework is imported."""
    if name is not None and not Path(name).exists() and not is_hub_name(name):
        raise PackingError(f"{option} {name}: no such folder or file, and not a hub name (`owner/name`)")


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Returns the special tokens of a tokenizer, as a config names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": entries(tokenizer), **{name: getattr(tokenizer, name) for name in names}}


def check_rows_of(records: Records, tokenizer: Any) -> None:
    """Checks that rows that ``crosspack pack`` wrote hold token ids of this tokenizer.

    Raises:
        PackingError: their manifest names another.
    """
    for folder in dict.fromkeys(os.path.dirname(file.path) or "." for file in records.all_files()):
        try:
            packed_by = json.loads(_content(f"{folder}/manifest.json") or "{}").get(DIGEST)
        except (ValueError, AttributeError):  # somebody else's
            continue
        if packed_by not in (None, vocabulary_digest(tokenizer)):
            name = tokenizer.name_or_path
            raise PackingError(
                f"{folder} was packed with another tokenizer than {name}, so its token ids mean other texts: pack the "
                f"data again with --tokenizer {name}"
            )


def _content(path: str) -> bytes | None:
    """Returns the content of a file or a URL; None if there is none."""
    if not is_url(path):
        return Path(path).read_bytes() if Path(path).is_file() else None
    with remote(path) as (system, name):
        content: bytes | None = system.cat_file(name) if system.isfile(name) else None
    return content
