"""Locates the parts of a model: the transformers model in its wrappers, its decoder, and its own modules.

Also finds what shards or compiles them. Nothing here knows of packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.attention import PreTrainedModel

DATA_PARALLEL = "DataParallel splits a batch in the middle of its documents: use DistributedDataParallel (torchrun)"


def causal_lm(model: nn.Module) -> Any:
    """The outermost transformers model inside ``model``.

    Raises:
        UnsupportedModelError: there is none, or DataParallel stands around it.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a transformers model, got {_named(model)}")
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise UnsupportedModelError(DATA_PARALLEL)
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedModelError(
        f"there is no transformers model in {type(model).__name__}: pass one, or a module that holds one"
    )


def _named(other: Any) -> str:
    """Names an argument that is no PyTorch module, and the way out."""
    kind = type(other)
    if any(base.__module__.partition(".")[0] == "flax" for base in kind.__mro__):
        return (
            f"the flax model {kind.__name__}: JAX models come from crosspack.load(folder), are always packed, and are "
            "trained by jax_backend.make_train_step and judged by jax_backend.audit"
        )
    way = "load it first, transformers.AutoModelForCausalLM.from_pretrained(...)"
    return f"a {kind.__name__} ({other!r:.60}): {way}"


def decoder_of(root: Any) -> Any:
    """The model inside the causal language model that embeds the tokens and makes the masks."""
    embedding = root.get_input_embeddings()
    inner = [m for m in root.modules() if isinstance(m, PreTrainedModel) and m is not root]
    for found in (root.get_decoder(), root.base_model, *inner):
        # a vision or audio model inside a decoder is not its decoder
        if isinstance(found, PreTrainedModel) and found is not root and embedding in found.modules():
            return found
    return root


def own_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules inside a model, without those of other models in it (vision, audio)."""
    for name, module in model.named_children():
        if not isinstance(module, PreTrainedModel):
            yield prefix + name, module
            yield from own_modules(module, f"{prefix}{name}.")


def sharding_inside(layer: nn.Module) -> str | None:
    """Returns the name of what shards the parameters of a module call by call, None if nothing does."""
    for module in layer.modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            return "FSDP"
    if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
        return "DeepSpeed ZeRO-3"
    return None


def refuse_sharding_inside(root: nn.Module, per_document: Mapping[str, nn.Module]) -> None:
    """Raise if several ranks share the parameters of layers that run per document.

    These are called as often as a rank has kinds of documents.
    """
    if not per_document or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for name, layer in per_document.items():
        if kind := sharding_inside(layer):
            raise UnsupportedModelError(
                f"{type(root).__name__} is sharded by {kind}, and {name} runs on batches of documents of "
                "similar length: ranks would gather its parameters a different number of times, and hang. Keep "
                "parameters whole (DDP, ZeRO-1, ZeRO-2), or with FSDP2 shard no module inside of it"
            )


def has_compiled_layers(decoder: nn.Module) -> bool:
    """Returns whether modules inside were compiled on their own, ``layer.compile()``."""
    return any(module._compiled_call_impl is not None for module in decoder.modules())
