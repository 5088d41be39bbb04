"""Hugging Face safetensors folders in and out: ``config.json`` and ``model*.safetensors`` <-> an ``nnx`` decoder.

A parameter's path in the decoder is its name in the checkpoint; kernels are transposed, since torch keeps them [out,
in].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.placement import to_host, weight_sharding
from packing_core.errors import LayoutError, PackingError, naming
from packing_core.extras import require

_INDEX = "model.safetensors.index.json"


def load(folder: str | Path, **options: Any) -> Decoder:
    """Build a :class:`~jax_backend.model.decoder.Decoder` from a local Hugging Face folder.

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` (or its shards and their index).
        options: ``dtype``, ``param_dtype``, ``remat``, ``implementation``, ``mesh`` of the decoder. With a ``mesh``
            each device reads the part of each tensor that it keeps, laid out as `make_train_step` lays weights out.

    Raises:
        PackingError: a file is missing; pickled checkpoints are never read.
        UnsupportedModelError: a family or option that the decoder does not compute exactly.
        LayoutError: the checkpoint's names or shapes are not the config's.
    """
    folder = Path(folder)
    config = DecoderConfig.from_hf(folder)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(abstract)
    _fill(state, _open(folder), options.get("mesh"))
    return nnx.merge(graph, state)


def save(model: Decoder, folder: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` that transformers loads; weights keep their dtype.

    Weights are gathered on the host. In a job of several processes all must call it; the first one writes. An
    ``nnx.LoRA`` around a linear layer, and an ``nnx.LoRALinear``, are written as one kernel, the adapter added to it.

    Raises:
        PackingError: it is no decoder.
        LayoutError: the model has weights that its config does not describe, which transformers would not read.
    """
    if not isinstance(model, Decoder):
        raise PackingError(f"save writes a Decoder, got {type(model).__name__}: write other models with orbax")
    writer = require("safetensors.numpy", extra="jax")
    folder = Path(folder)
    tensors = export(nnx.state(_merged(model), nnx.Param))
    plain = nnx.eval_shape(lambda: Decoder(model.config, rngs=nnx.Rngs(0)))
    wanted = {name for parameter in _parameters(nnx.state(plain, nnx.Param)) for name in parameter.names.flat}
    if tensors.keys() != wanted:
        raise LayoutError(
            f"the model has {sorted(tensors.keys() - wanted) or 'nothing'} that its config does not describe and lacks "
            f"{sorted(wanted - tensors.keys()) or 'nothing'}, so transformers would load it with random weights: "
            "merge adapters into their kernels, and take out what else was put into its layers"
        )
    if jax.process_index():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2, sort_keys=True) + "\n")
    writer.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _merged(model: Decoder) -> Decoder:
    """The model without flax's LoRA layers: each product A B is added to the kernel below it, in a new model."""
    model = nnx.merge(*nnx.split(model))  # other modules around the same variables
    for _, parent in list(nnx.iter_modules(model)):
        for name, child in list(vars(parent).items()):
            base: Any
            if isinstance(child, nnx.LoRALinear):
                base, lora = child, child.lora
                del child.lora
            elif isinstance(child, nnx.LoRA) and isinstance(child.base_module, nnx.Linear):
                base, lora = child.base_module, child
                setattr(parent, name, base)
            else:
                continue
            kernel = base.kernel[...]
            update = jnp.matmul(lora.lora_a[...], lora.lora_b[...], precision="highest").astype(jnp.float32)
            base.kernel = base.kernel.replace((kernel.astype(jnp.float32) + update).astype(kernel.dtype))
    return model


def export(state: nnx.State) -> dict[str, np.ndarray]:
    """Checkpoint name -> array on the host, in the checkpoint's orientation, of a decoder's parameters (or of their
    gradients)."""
    return {name: tensor for parameter in _parameters(state) for name, tensor in parameter.tensors()}


def assign(state: nnx.State, tensors: Mapping[str, Any]) -> None:
    """Fill ``state`` in place from checkpoint-named arrays, casting to each parameter's dtype and keeping its sharding.

    Raises:
        LayoutError: names that lack or that nothing takes, or a shape that differs; nothing is filled then.
    """
    hosted = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    for parameter in _checked(state, {name: tensor.shape for name, tensor in hosted.items()}):
        leaf = parameter.leaf
        leaf.set_value(jax.device_put(parameter.read(hosted, parameter.everything), leaf[...].sharding))


def _fill(state: nnx.State, tensors: Mapping[str, Any], mesh: Mesh | None) -> None:
    """Fill abstract ``state`` from open safetensors slices; each device reads its own shard."""
    for parameter in _checked(state, {name: tuple(part.get_shape()) for name, part in tensors.items()}):
        leaf, read = parameter.leaf, partial(parameter.read, tensors)
        if mesh is None:
            leaf.set_value(jnp.asarray(read(parameter.everything)))
        else:
            sharding = weight_sharding(leaf.shape, mesh, parameter.path)
            leaf.set_value(jax.make_array_from_callback(leaf.shape, sharding, read, dtype=leaf.dtype))


@dataclass(frozen=True)
class _Parameter:
    """A decoder's parameter and the tensors of a checkpoint that it holds: one, or one of each stacked layer, of each
    expert, or of each stacked layer's experts, as ``names`` has axes."""

    names: np.ndarray
    path: tuple[str, ...]
    leaf: Any
    turned: bool  # kernels: torch keeps them [out, in]

    @property
    def everything(self) -> tuple[slice, ...]:
        """The index of the whole parameter."""
        return (slice(None),) * len(self.leaf.shape)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors in the checkpoint."""
        shape = self.leaf.shape[self.names.ndim :]
        return shape[::-1] if self.turned else shape

    def read(self, tensors: Mapping[str, Any], index: Any) -> np.ndarray:
        """The part ``index`` of the parameter from arrays or safetensors slices, in the parameter's dtype."""
        depth = self.names.ndim
        inner = index[depth:]
        names = np.asarray(self.names[index[:depth]], object)
        parts = [tensors[name][inner[::-1] if self.turned else inner] for name in names.flat]
        parts = [part.T if self.turned else part for part in parts]
        whole = np.stack(parts) if depth else parts[0]
        return np.ascontiguousarray(whole.reshape(*names.shape, *parts[0].shape), self.leaf.dtype)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """The checkpoint's tensors, on the host."""
        whole = to_host(self.leaf[...])
        for place, name in np.ndenumerate(self.names):
            part = whole[place]
            yield name, np.ascontiguousarray(part.T if self.turned else part)


def _checked(state: nnx.State, shapes: Mapping[str, tuple[int, ...]]) -> list[_Parameter]:
    """All parameters, whose names and shapes are those of a checkpoint."""
    wanted = list(_parameters(state))
    names = {name for parameter in wanted for name in parameter.names.flat}
    missing, extra = sorted(names - shapes.keys()), sorted(shapes.keys() - names)
    # Tied heads, frequencies, and the layers that predict a second token, which transformers leaves out as well.
    unread = ("lm_head.weight", "mtp.")
    extra = [name for name in extra if not name.startswith(unread) and not name.endswith("rotary_emb.inv_freq")]
    if missing or extra:
        raise LayoutError(
            f"the checkpoint lacks {missing or 'nothing'} and has {extra or 'nothing'} that the config does not: "
            "the config.json beside it describes another model"
        )
    for parameter in wanted:
        for name in parameter.names.flat:
            if shapes[name] != parameter.tensor_shape:
                raise LayoutError(f"{name} has shape {shapes[name]} and the config asks for {parameter.tensor_shape}")
    return wanted


def _parameters(state: nnx.State) -> Iterator[_Parameter]:
    found = nnx.to_flat_state(state)
    period = len({path[2] for path, _ in found if path[1] == "blocks"})
    scanned = max((leaf.shape[0] * period for path, leaf in found if path[1] == "blocks"), default=0)
    for path, leaf in found:
        parts = [str(part) for part in path]
        turned = parts[-1] == "kernel"
        parts[-1] = {"kernel": "weight", "embedding": "weight"}.get(parts[-1], parts[-1])
        axes: list[tuple[int, range]] = []  # position in the name, and the numbers that stand there
        if parts[1] == "blocks":
            axes.append((2, range(int(parts[2]), scanned, period)))
        elif parts[1] == "layers":
            parts[2] = str(scanned + int(parts[2]))
        if turned and "experts" in parts:  # a checkpoint keeps these for each expert by itself
            parts.insert(parts.index("experts") + 1, "")
            axes.append((parts.index("experts") + 1, range(leaf.shape[len(axes)])))
        parts[1] = "layers" if parts[1] == "blocks" else parts[1]
        names = np.empty([len(numbers) for _, numbers in axes], object)
        for place in np.ndindex(names.shape):
            for (position, numbers), i in zip(axes, place, strict=True):
                parts[position] = str(numbers[i])
            names[place] = ".".join(parts)
        yield _Parameter(names, tuple(map(str, path)), leaf, turned)


def _open(folder: Path) -> dict[str, Any]:
    """Name -> safetensors slice, of which nothing is read yet."""
    safetensors = require("safetensors", extra="jax")
    if (folder / _INDEX).is_file():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise PackingError(f"{folder} lacks {', '.join(absent)}: only safetensors are read, never pickled weights")
    slices: dict[str, Any] = {}
    for file in files:
        with naming(f"{folder / file} is damaged or cut off", safetensors.SafetensorError, way_out="copy it again"):
            opened = safetensors.safe_open(folder / file, "numpy")
        slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
    return slices
