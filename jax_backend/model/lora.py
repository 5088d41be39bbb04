"""Low-rank adapters on a decoder's linear layers, written as peft reads them.

``y = W x + 2 B A x`` with A [r, in] random and B [out, r] zero at first (LoRA, Hu et al. 2021, arXiv:2106.09685). Only
A and B are ``nnx.LoRAParam``: ``make_train_step(model, tx, trainable=nnx.LoRAParam)`` trains them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_backend.model.decoder import Decoder
from jax_backend.model.linear import PLAIN, multiply
from jax_backend.model.weights import export
from packing_core.extras import require

SCALE = 2.0  # alpha is twice the rank


class Adapted(nnx.Module):
    """A linear layer and its adapter; both may have a leading axis of scanned layers."""

    def __init__(self, linear: nnx.Linear, rank: int, rngs: nnx.Rngs) -> None:
        *stacked, inputs, outputs = linear.kernel.shape
        self.linear = linear
        bound = inputs**-0.5  # as peft draws A
        a = jax.random.uniform(rngs.params(), (*stacked, inputs, rank), jnp.float32, -bound, bound)
        self.lora_A = LoRAKernel(a)
        self.lora_B = LoRAKernel(jnp.zeros((*stacked, rank, outputs), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + SCALE * multiply(multiply(x, self.lora_A.kernel[...]), self.lora_B.kernel[...])


class LoRAKernel(nnx.Module):
    """One factor of an adapter, ``kernel`` [in, out]."""

    def __init__(self, kernel: jax.Array) -> None:
        self.kernel = nnx.LoRAParam(kernel)


def add_adapters(model: Decoder, rank: int, seed: int) -> Decoder:
    """Put an adapter of ``rank`` on every ``nnx.Linear`` but the output layer, in place. Adapters are float32."""
    rngs = nnx.Rngs(seed)
    for parent, name, linear in list(_linear_layers(model.model)):
        setattr(parent, name, Adapted(linear, rank, rngs))
    return model


def save_adapters(model: Decoder, folder: str | Path, base: str) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` for ``peft.PeftModel.from_pretrained``.

    Args:
        model: with adapters.
        base: the folder or hub name of the model below them.
    """
    writer = require("safetensors.numpy", extra="jax")
    tensors = {f"base_model.model.{name}": tensor for name, tensor in export(nnx.state(model, nnx.LoRAParam)).items()}
    if jax.process_index():
        return
    ranks = {int(tensor.shape[0]) for name, tensor in tensors.items() if ".lora_A." in name}
    rank = ranks.pop()
    about = {
        "base_model_name_or_path": base,
        "bias": "none",
        "lora_alpha": SCALE * rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
        "task_type": "CAUSAL_LM",
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer.save_file({name: np.asarray(x) for name, x in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")


def _linear_layers(root: nnx.Module) -> Iterator[tuple[Any, str, nnx.Linear]]:
    """Each linear layer below ``root``, with the module that holds it and its name there."""
    for _, parent in nnx.iter_modules(root):
        for name, child in vars(parent).items():
            if type(child) in PLAIN:
                yield parent, name, child
