"""The function that a train step differentiates: the loss of a microbatch, and the model's variables around it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import Mesh

from jax_backend.losses.cross_entropy import packed_cross_entropy
from jax_backend.model.decoder import Decoder
from jax_backend.placement import CONTEXT, TENSOR
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError, naming

logger = logging.getLogger(__name__)

INPUTS = ("input_ids", "segment_ids", "position_ids")  # of a model, in the order in which it is called

_WORDS = {"mask": -1, "seg": 1, "pos": 2, "input": 0, "token": 0}  # in names of parameters: which of INPUTS

# (model, microbatch) -> (loss sum, weight sum) or (loss sum, weight sum, extra values by name)
LossFunction = Callable[[Any, dict[str, jax.Array]], tuple[Any, ...]]


def causal_lm_loss(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sums of next-token losses and of weights, of a batch [B, S] that `to_batch` made.

    A `Decoder` keeps no logits; another module is called with ``input_ids, segment_ids, position_ids`` for its logits.

    Raises:
        UnsupportedModelError: the module's parameters are named for something else.
    """
    if isinstance(model, Decoder):
        return model.loss(batch)
    check_signature(model)
    logits = model(*(batch[name] for name in INPUTS))
    return packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])


def check_signature(model: Any) -> None:
    """Look at the names of the first three parameters of a module: they must not be those of something else.

    Raises:
        UnsupportedModelError: one is named for another of `INPUTS` than it receives, or for a mask, which would make
            one document of all that is not 0.
    """
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):  # a callable without a signature
        return
    for at, name in enumerate(names[: len(INPUTS)]):
        # The first word that occurs says what it is: inputs_segment_ids are segment ids.
        is_for = next((i for word, i in _WORDS.items() if word in name), at)
        if is_for != at:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes {', '.join(names)}, and is called with {', '.join(INPUTS)} in this "
                f"order, so {name} would receive {INPUTS[at]}: rename it, or pass a loss_fn that calls the model"
            )


def refuse_linen(model: Any) -> None:
    """Raise for a ``linen`` module or class.

    Raises:
        UnsupportedModelError: it is one.
    """
    kind = model if isinstance(model, type) else type(model)
    if issubclass(kind, linen.Module):
        raise UnsupportedModelError(
            f"{kind.__name__} is a flax.linen module, which keeps no weights: wrap it in "
            "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)), call nnx.bridge.lazy_init on that, and pass a loss_fn"
        )


def check_variables(params: nnx.State, rest: nnx.State) -> None:
    """Check the trained variables, and those that are not trained.

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


def check_optimizer(tx: Any) -> None:
    """Look at the optimizer, and warn of one that takes means of steps.

    Raises:
        PackingError: it is no optax transformation.
    """
    if isinstance(tx, nnx.Optimizer):
        raise PackingError(
            "tx is an nnx.Optimizer, which holds a model of its own: pass the optax transformation, tx.tx"
        )
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise PackingError(f"tx must be an optax transformation such as optax.adamw(1e-3), got {type(tx).__name__}")
    if isinstance(tx, optax.MultiSteps) or isinstance(getattr(tx.update, "__self__", None), optax.MultiSteps):
        logger.warning(
            "optax.MultiSteps takes the mean of gradients that are means over the targets of a step, and packed rows "
            "hold unequal numbers of targets: pass the microbatches as one batch [A, B, S], whose sums are divided once"
        )


def check_compute_dtype(dtype: Any) -> None:
    """Raises UnsupportedError unless gradients that are computed in ``dtype`` keep small values."""
    if dtype is not None and jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise UnsupportedError(
            f"compute_dtype={jnp.dtype(dtype)}: small gradients would become 0, and a training step does not scale "
            "them: pass jnp.bfloat16, or None for the dtype of the layers"
        )


def check_vocabulary(batch: Mapping[str, Any], vocabulary: int) -> None:
    """Look at the ids of a batch in the host's memory; arrays of a device are not read.

    Raises:
        LayoutError: an input, or a target that has a weight, is not in the vocabulary.
    """
    for name in ("input_ids", "targets"):
        if isinstance(batch[name], jax.Array):
            continue
        ids = np.asarray(batch[name])
        outside = (ids < 0) | (ids >= vocabulary)
        if name == "targets" and outside.any() and not isinstance(batch["loss_weights"], jax.Array):
            outside &= np.asarray(batch["loss_weights"]) != 0
        if outside.any():
            where = tuple(int(i) for i in np.argwhere(outside)[0])
            raise LayoutError(
                f"{name}{list(where)} is {ids[where]}, and the vocabulary is 0 to {vocabulary - 1}: compare the "
                "tokenizer's vocabulary with the model's, and give targets that are not trained a loss weight of 0"
            )


def has_microbatches(shapes: Mapping[str, tuple[int, ...]], stated: bool | None) -> bool:
    """Returns True if the first axis of a batch's arrays counts microbatches, False if it counts rows.

    Raises:
        LayoutError: nothing tells.
    """
    if stated is not None:
        return stated
    if "input_ids" not in shapes:
        raise LayoutError(
            f"the batch has keys of its own ({', '.join(shapes)}), and without input_ids nothing tells [A, B, ...] "
            "from [B, ...]: pass make_train_step(microbatched=True) or microbatched=False"
        )
    return len(shapes["input_ids"]) != 2


def checked_sums(result: Any) -> tuple[jax.Array, jax.Array, Any]:
    """The loss sum, the weight sum and the further values that a loss function returned.

    Raises:
        PackingError: it returned something else.
    """
    wanted = "loss_fn must return (loss_sum, weight_sum) or (loss_sum, weight_sum, extra)"
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise PackingError(
            f"{wanted}, and it returned {type(result).__name__}: the step divides the sums of all microbatches once, "
            "so return a sum and the number that divides it"
        )
    try:
        loss, weight = (jnp.asarray(x) for x in result[:2])
    except (TypeError, ValueError) as error:
        kinds = " and ".join(type(x).__name__ for x in result[:2])
        raise PackingError(f"{wanted}, both numbers, and they are {kinds}") from error
    if loss.shape or weight.shape:
        raise PackingError(f"{wanted}, both scalars, and they have shapes {loss.shape} and {weight.shape}: sum them")
    extra = result[2] if len(result) == 3 else {}
    if not isinstance(extra, Mapping):
        raise PackingError(f"{wanted}, where extra maps names to values, and it is {type(extra).__name__}")
    with naming(f"{wanted}, where extra maps names to numbers", (TypeError, ValueError)):
        return loss, weight, jax.tree.map(jnp.asarray, dict(extra))


def refuse_donated(tree: Any) -> None:
    """Raise for a state whose buffers an earlier step took.

    Raises:
        PackingError: it is one.
    """
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    if any(not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted() for leaf in arrays):
        raise PackingError(
            "an earlier step took the buffers of this state (or of these sums): use what that step returned, or pass "
            "it jax.tree.map(jax.numpy.copy, state)"
        )


def check_shared_rows(model: Decoder, mesh: Mesh) -> None:
    """Raises if a decoder cannot be cut over the mesh's axes ``tensor`` and ``context``.

    Raises:
        LayoutError: its heads do not divide.
        UnsupportedError: a layer or an option needs whole rows.
    """
    config, parts = model.config, mesh.shape.get(TENSOR, 1)
    if config.num_attention_heads % parts or config.num_key_value_heads % parts:
        raise LayoutError(
            f"{config.num_attention_heads} query heads and {config.num_key_value_heads} key/value heads do not divide "
            f"over the {parts} devices of axis {TENSOR!r}"
        )
    if mesh.shape.get(CONTEXT, 1) == 1:
        return
    if any(kind.recurrent for kind in config.layers):
        raise UnsupportedError(f"axis {CONTEXT!r}: gated delta nets scan whole rows: name it data or fsdp")
    if model.max_segments is not None:
        raise UnsupportedError(f"axis {CONTEXT!r}: max_segments counts the segments of whole rows: leave it out")


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


def quotient(value: Any) -> jax.Array:
    """Returns a value, or of a pair (sum, weight) their quotient, 0 where the weight is 0."""
    if not isinstance(value, tuple):
        return value
    total, weight = value
    return jnp.where(weight != 0, total / jnp.where(weight != 0, weight, 1), 0)
