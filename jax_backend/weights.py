"""Hugging Face safetensors folders in and out: ``config.json`` and ``model*.safetensors`` <-> an ``nnx`` decoder.

A parameter's path in the decoder is its name in the checkpoint; kernels are transposed, since torch keeps them [out,
in].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_backend.model import Decoder, DecoderConfig
from packing_core.errors import LayoutError, PackingError
from packing_core.extras import require

_INDEX = "model.safetensors.index.json"


def load(folder: str | Path, **options: Any) -> Decoder:
    """Build a :class:`~jax_backend.model.Decoder` from a local Hugging Face folder.

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` (or its shards and their index).
        options: ``dtype``, ``param_dtype``, ``remat``, ``implementation``, ``mesh`` of the decoder.

    Raises:
        PackingError: a file is missing; pickled checkpoints are never read.
        UnsupportedModelError: a family or option that the decoder does not compute exactly.
        LayoutError: the checkpoint's names or shapes are not the config's.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise PackingError(f"{folder} holds no config.json: give a folder written by save_pretrained")
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(abstract)
    assign(state, _read(folder))
    return nnx.merge(graph, state)


def save(model: Decoder, folder: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` that transformers loads; weights keep their dtype."""
    numpy_file = require("safetensors.flax", extra="jax")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2, sort_keys=True) + "\n")
    numpy_file.save_file(export(nnx.state(model, nnx.Param)), folder / "model.safetensors", metadata={"format": "pt"})


def export(state: nnx.State) -> dict[str, jax.Array]:
    """Checkpoint name -> array, in the checkpoint's orientation, of a decoder's parameters (or of their gradients)."""
    return {name: _turn(path, jnp.asarray(leaf[...])) for name, path, leaf in _named(state)}


def assign(state: nnx.State, tensors: Mapping[str, Any]) -> None:
    """Fill ``state`` in place from checkpoint-named ``tensors``, casting to each parameter's dtype.

    Raises:
        LayoutError: names that lack or that nothing takes, or a shape that differs; nothing is filled then.
    """
    wanted = {name: (path, leaf) for name, path, leaf in _named(state)}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    extra = [name for name in extra if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")]
    if missing or extra:
        raise LayoutError(
            f"the checkpoint lacks {missing or 'nothing'} and has {extra or 'nothing'} that the config does not: "
            "the config.json beside it describes another model"
        )
    turned = {name: _turn(path, jnp.asarray(tensors[name])) for name, (path, _) in wanted.items()}
    for name, (_, leaf) in wanted.items():
        if turned[name].shape != leaf.shape:
            raise LayoutError(f"{name} has shape {turned[name].shape} and the config asks for {leaf.shape}")
    for name, (_, leaf) in wanted.items():
        leaf.set_value(turned[name].astype(leaf.dtype))


def _named(state: nnx.State) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for path, leaf in nnx.to_flat_state(state):
        parts = [str(part) for part in path]
        parts[-1] = {"kernel": "weight", "embedding": "weight"}.get(parts[-1], parts[-1])
        yield ".".join(parts), path, leaf


def _turn(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
    return array.T if path[-1] == "kernel" else array


def _read(folder: Path) -> dict[str, np.ndarray]:
    reader = require("safetensors.flax", extra="jax")
    if (folder / _INDEX).is_file():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise PackingError(f"{folder} lacks {', '.join(absent)}: only safetensors are read, never pickled weights")
    return {name: tensor for file in files for name, tensor in reader.load_file(folder / file).items()}
