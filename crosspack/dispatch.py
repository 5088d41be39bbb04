"""The verbs that torch and JAX share: each runs the function of the framework whose objects it is given.

A model, an optimizer or an array -> the framework that made it, by the modules of its classes, so nothing is imported
to find out -> the function of that name in ``torch_backend`` or ``jax_backend``. What belongs to one framework alone
names the other's way where it is given the other's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from packing_core.errors import MissingExtraError, UnsupportedError, UnsupportedModelError

Backend = Literal["torch_backend", "jax_backend"]

_OF_JAX = frozenset({"jax", "jaxlib", "flax", "optax", "jax_backend"})
_OF_TORCH = frozenset({"torch", "transformers", "trl", "peft", "accelerate", "torch_backend"})


def backend_of(values: Iterator[Any]) -> Backend | None:
    """Returns the backend of the first value that either framework made; None if there is none.

    Containers are looked into: weights come as dictionaries of arrays, batches as dictionaries of tensors.
    """
    for value in values:
        modules = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
        if modules & _OF_JAX:
            return "jax_backend"
        if modules & _OF_TORCH:
            return "torch_backend"
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if (found := backend_of(iter(inner))) is not None:
            return found
    return None


def _shared(name: str, does: str) -> Callable[..., Any]:
    """Returns the verb of this name, which runs ``torch_backend``'s or, given objects of JAX, ``jax_backend``'s."""

    def verb(*arguments: Any, **options: Any) -> Any:
        backend = backend_of(iter([*arguments, *options.values()])) or "torch_backend"
        return getattr(import_module(backend), name)(*arguments, **options)

    verb.__name__ = verb.__qualname__ = name
    verb.__module__ = "crosspack"  # where pickle finds it
    verb.__doc__ = f"{does}: ``torch_backend.{name}``, or ``jax_backend.{name}`` for objects of JAX."
    return verb


def patch(*arguments: Any, **options: Any) -> Any:
    """Patches a transformers model: ``torch_backend.patch``.

    Raises:
        UnsupportedModelError: it is a JAX model, which needs no patch.
    """
    if backend_of(iter(arguments[:1])) == "jax_backend":
        raise UnsupportedModelError(
            "crosspack.patch is for torch models; a JAX model needs none: crosspack.load(folder) returns a decoder "
            "that takes segments, and crosspack.segment_attention serves a model of your own"
        )
    return import_module("torch_backend").patch(*arguments, **options)


def load(*arguments: Any, **options: Any) -> Any:
    """Reads a Hugging Face folder as a flax decoder: ``jax_backend.load``.

    Raises:
        MissingExtraError: JAX is not installed.
        UnsupportedError: an argument is of torch.
    """
    way = "for torch, AutoModelForCausalLM.from_pretrained(folder) and crosspack.patch(model)"
    if find_spec("jax") is None:
        raise MissingExtraError(
            f"crosspack.load reads a folder for JAX, which is not installed: pip install 'crosspack[jax]'; {way}"
        )
    if backend_of(iter([*arguments, *options.values()])) == "torch_backend":
        raise UnsupportedError(f"crosspack.load reads a folder for JAX, and was given an argument of torch: {way}")
    return import_module("jax_backend").load(*arguments, **options)


SHARED: dict[str, Callable[..., Any]] = {
    "patch": patch,
    "load": load,
    "audit": _shared("audit", "Audits a model or a trainer"),
    "explain": _shared("explain", "Explains what runs"),
    "make_train_step": _shared("make_train_step", "Builds a training step of a model and an optimizer"),
    "packed_cross_entropy": _shared("packed_cross_entropy", "Computes the loss of packed logits"),
    "reduce": _shared("reduce", "Reduces values of tokens to documents"),
    "spread": _shared("spread", "Spreads values of documents over tokens"),
    "token_logprobs": _shared("token_logprobs", "Computes log-probabilities of tokens"),
}
