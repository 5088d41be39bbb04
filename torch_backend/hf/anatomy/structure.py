"""Locates the parts of a model: the transformers model in its wrappers, its decoder, its own modules, their device.

Also finds what shards, compiles or replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from packing_core.errors import UnsupportedModelError
from packing_core.extras import require

require("transformers", extra="hf")

from transformers import PreTrainedModel  # noqa: E402

from torch_backend.hf.override import original_class  # noqa: E402

STATE = "_crosspack"  # the attribute under which a patched model keeps its state
_ABSENT = object()
LIBRARIES = {"liger_kernel": "Liger", "unsloth": "Unsloth"}
DATA_PARALLEL = "DataParallel splits a batch in the middle of its documents: use DistributedDataParallel (torchrun)"


def causal_lm(model: nn.Module) -> Any:
    """The outermost transformers model inside ``model``; the first of several that are all patched.

    Raises:
        UnsupportedModelError: there is none, DataParallel stands around it, or one of several is not patched.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a transformers model, got {_named(model)}")
    models = dict(_outermost(model, "", {id(model)}))
    if not models:
        raise UnsupportedModelError(
            f"there is no transformers model in {type(model).__name__}: pass one, or a module that holds one"
        )
    for name, module in models.items() if len(models) > 1 else ():
        if STATE not in module.__dict__:
            raise UnsupportedModelError(
                f"{type(model).__name__} holds {len(models)} transformers models, and {name} is not patched: packed "
                f"batches would run on it as one document. Call crosspack.patch(module.{name}), and so for each of "
                f"{', '.join(models)}"
            )
    return next(iter(models.values()))


def _outermost(module: nn.Module, name: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the transformers models in a module that lie in no other one, by name."""
    if isinstance(module, nn.DataParallel):
        raise UnsupportedModelError(DATA_PARALLEL)
    if isinstance(module, PreTrainedModel):
        yield name, module
    else:
        for child, inner in module.named_children():
            if id(inner) not in visited:
                visited.add(id(inner))
                yield from _outermost(inner, f"{name}.{child}" if name else child, visited)


@contextmanager
def with_values(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, attributes have other values (the object, the name, the value); afterwards those of before, or none."""
    values = list(values)
    before = [(owner, name, getattr(owner, name, _ABSENT)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Inside, tensors are made on the CPU and in float32, whatever defaults the process has set."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, a model is in training or evaluation mode; afterwards each of its modules has its own mode again.

    ``model.train()`` alone would put frozen modules into training mode, and their dropout and batch statistics with
    them. It is called all the same, for modules that do more in it than to set their mode.
    """
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        model.train(modes[model])
        for module, before in modes.items():
            module.training = before


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
    """The model inside the causal language model that embeds the tokens and makes the masks.

    Raises:
        UnsupportedModelError: the model does not say what embeds its tokens.
    """
    try:
        embedding = root.get_input_embeddings()
    except (NotImplementedError, AttributeError) as error:  # as transformers says it of classes of one's own
        raise UnsupportedModelError(
            f"{type(root).__name__} does not say which module embeds its tokens: let its get_input_embeddings() return "
            "it, or patch the model of transformers inside it"
        ) from error
    inner = [m for m in root.modules() if isinstance(m, PreTrainedModel) and m is not root]
    around = (m for m in (root.get_decoder(), root.base_model, *inner) if isinstance(m, PreTrainedModel))
    # a vision or audio model inside a decoder is not its decoder
    return next((m for m in around if m is not root and embedding in m.modules()), root)


def own_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules inside a model, without those of other models in it (vision, audio)."""
    for name, module in model.named_children():
        if not isinstance(module, PreTrainedModel):
            yield prefix + name, module
            yield from own_modules(module, f"{prefix}{name}.")


def execution_device(model: nn.Module) -> torch.device:
    """The device of the first layer's computation, even if its weights are elsewhere between calls.

    accelerate's offloading leaves parameters on the ``meta`` device and loads them in a hook, which knows the device.
    """
    placed = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    hooks: Iterator[Any] = (module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook"))
    parts = (part for hook in hooks for part in getattr(hook, "hooks", (hook,)))  # several hooks are kept in one
    loaded = (device for part in parts if (device := getattr(part, "execution_device", None)) is not None)
    device = next(chain(placed, loaded), "meta")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def library_of(value: Any) -> str | None:
    """Names the library that a class, a function or a method comes from; None if it is none of :data:`LIBRARIES`."""
    value = getattr(value, "__func__", value)
    return LIBRARIES.get(str(getattr(value, "__module__", "")).partition(".")[0])


def refuse_replaced_layers(root: nn.Module) -> None:
    """Check that no class of a model's own runs Unsloth's forward, which attends by itself and not as it is told.

    Raises:
        UnsupportedModelError: one does, as in every model after Unsloth's ``FastLanguageModel`` loaded one.
    """
    kinds = {original_class(m) for m in root.modules() if library_of(original_class(m)) is None}
    name = min((kind.__name__ for kind in kinds if library_of(kind.forward) == "Unsloth"), default=None)
    if name is not None:
        raise UnsupportedModelError(
            f"{name} runs Unsloth's forward, which computes attention by itself and would not keep the documents of a "
            "row apart as crosspack.patch has it: load the model by transformers, in a process that does not load "
            "Unsloth's FastLanguageModel"
        )


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


def why_not_adapters(*models: Any) -> str | None:
    """Explains why a model's adapters of PEFT read more of a row than the token they are applied to; None if none does.

    PEFT notes adapters in ``peft_config``, whoever added them and when. Most change weights, alike for every token.
    """
    return next(_reaching_adapters(models), None)


def _reaching_adapters(models: Iterable[Any]) -> Iterator[str]:
    for model in models:
        configs = getattr(model, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, Mapping) else ():
            if getattr(config, "alora_invocation_tokens", None):
                yield (
                    f"adapter {name!r} (activated LoRA) starts at the last invocation tokens of a row and acts on all "
                    "documents after them: train it unpacked, or plain LoRA packed"
                )
            if getattr(config, "peft_type", None) == "LILY":
                yield (
                    f"adapter {name!r} (LILY) mixes its experts by the mean over all tokens of a batch: train it "
                    "unpacked, or LoRA packed"
                )
