"""The verbs that torch and JAX share: each runs the function of the framework whose objects it is given.

A model, an optimizer or an array -> the framework that made it, by the modules of its classes, so nothing is imported
to find out -> the function of that name in ``torch_backend`` or ``jax_backend``. What belongs to one framework alone
names the other's way where it is given the other's objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def _given(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[Any]:
    yield from arguments
    yield from options.values()


def _call(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    backend = backend_of(_given(arguments, options)) or "torch_backend"
    return getattr(import_module(backend), name)(*arguments, **options)


def audit(*arguments: Any, **options: Any) -> Any:
    """Audits a model or a trainer: ``torch_backend.audit``, or ``jax_backend.audit`` of a flax model or JAX weights."""
    return _call("audit", arguments, options)


def explain(*arguments: Any, **options: Any) -> Any:
    """Explains what runs: ``torch_backend.explain``, or ``jax_backend.explain`` of a decoder or JAX arrays."""
    return _call("explain", arguments, options)


def make_train_step(*arguments: Any, **options: Any) -> Any:
    """Builds a training step: ``torch_backend.make_train_step``, or JAX's for a flax model and an optax optimizer."""
    return _call("make_train_step", arguments, options)


def packed_cross_entropy(*arguments: Any, **options: Any) -> Any:
    """Computes the loss of packed logits: ``torch_backend.packed_cross_entropy``, or JAX's for JAX arrays."""
    return _call("packed_cross_entropy", arguments, options)


def reduce(*arguments: Any, **options: Any) -> Any:
    """Reduces values of tokens to documents: ``torch_backend.reduce``, or ``jax_backend.reduce`` for JAX arrays."""
    return _call("reduce", arguments, options)


def spread(*arguments: Any, **options: Any) -> Any:
    """Spreads values of documents over tokens: ``torch_backend.spread``, or ``jax_backend.spread`` for JAX arrays."""
    return _call("spread", arguments, options)


def token_logprobs(*arguments: Any, **options: Any) -> Any:
    """Computes log-probabilities of tokens: ``torch_backend.token_logprobs``, or JAX's for a flax model."""
    return _call("token_logprobs", arguments, options)


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
    if backend_of(_given(arguments, options)) == "torch_backend":
        raise UnsupportedError(f"crosspack.load reads a folder for JAX, and was given an argument of torch: {way}")
    return import_module("jax_backend").load(*arguments, **options)


SHARED = (
    "audit",
    "explain",
    "load",
    "make_train_step",
    "packed_cross_entropy",
    "patch",
    "reduce",
    "spread",
    "token_logprobs",
)
