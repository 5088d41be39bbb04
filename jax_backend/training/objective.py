"""The function that a train step differentiates: the loss of a microbatch, and the model's variables around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jax_backend.losses.cross_entropy import packed_cross_entropy
from jax_backend.model.decoder import Decoder
from packing_core.errors import PackingError, UnsupportedModelError

# (model, microbatch) -> (loss sum, weight sum) or (loss sum, weight sum, extra values by name)
LossFunction = Callable[[Any, dict[str, jax.Array]], tuple[Any, ...]]


def causal_lm_loss(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sums of next-token losses and of weights, of a batch [B, S] that `to_batch` made.

    A `Decoder` keeps no logits; another module is called with ``input_ids, segment_ids, position_ids`` for its logits.
    """
    if isinstance(model, Decoder):
        return model.loss(batch)
    logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    return packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])


def refuse_linen(model: Any) -> None:
    """Raise for a ``linen`` module.

    Raises:
        UnsupportedModelError: it is one.
    """
    if isinstance(model, linen.Module):
        raise UnsupportedModelError(
            f"{type(model).__name__} is a flax.linen module, which keeps no weights: wrap it in "
            "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)), call nnx.bridge.lazy_init on that, and pass a loss_fn"
        )


def check_variables(params: nnx.State, rest: nnx.State) -> None:
    """Look at what is trained, and at what is not.

    Raises:
        PackingError: nothing is trained.
        UnsupportedModelError: the model keeps batch statistics.
    """
    if not jax.tree.leaves(params):
        raise PackingError("trainable selects none of the model's variables: pass an nnx filter such as nnx.LoRAParam")
    for path, variable in nnx.to_flat_state(rest):
        if isinstance(variable, nnx.BatchStat):
            raise UnsupportedModelError(
                f"the model keeps batch statistics ({'.'.join(map(str, path))}), which mix the documents of a packed "
                "batch: use a norm over channels, such as nnx.RMSNorm"
            )


def fold_keys(rest: nnx.State, *numbers: jax.Array) -> nnx.State:
    """The variables with every random stream's key folded with ``numbers``, so that each microbatch draws anew.

    They are variables of the present trace, as nnx asks of those that a call changes (a stream's counter).
    """

    def fold(variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable
        key = variable[...]
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return variable.replace(key)

    own = jax.tree.map(lambda x: x, rest)
    return jax.tree.map(fold, own, is_leaf=lambda node: isinstance(node, nnx.Variable))


def cast_weights(tree: Any, dtype: Any) -> Any:
    """The tree with its floating-point arrays in ``dtype``; keys and counters are left alone."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
