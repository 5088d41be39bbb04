"""One optimizer step over packed rows: sums of losses and gradients over microbatches, divided once, then optax.

``make_train_step(model, tx, mesh)`` splits an ``nnx`` model into its structure, which is traced, and a
:class:`TrainState` of plain arrays, which is donated from step to step. Data flows ``[A, B, S]`` batches -> (loss sum,
weight sum, gradient sum) -> one division -> ``tx`` -> new state. Shape letters: A microbatches, B rows, S tokens of a
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_backend.loss import packed_cross_entropy
from jax_backend.model import Decoder
from packing_core.errors import LayoutError

Metrics = dict[str, jax.Array]

BATCH_KEYS = ("input_ids", "segment_ids", "position_ids", "targets", "loss_weights")


class TrainState(NamedTuple):
    """Everything that a step changes: float32 master weights, the optimizer's state, the number of steps taken."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array


class Sums(NamedTuple):
    """What a step's microbatches add up to before the one division, all float32 whatever the weights' dtype.

    A bfloat16 sum stops growing once it is 256 times as large as what is added.
    """

    loss: jax.Array
    weight: jax.Array
    grads: nnx.State


class TrainStep:
    """``state, metrics = train_step(state, batch)``; see :func:`make_train_step`.

    Attributes:
        mesh: what rows and weights are spread over, or None.
        tx: the optax transformation.
        precision: of matrix products, or None for what is in force.
        compilations: for how many batch shapes the step was compiled; a new segmentation of a shape adds none.
    """

    def __init__(
        self, model: Decoder, tx: optax.GradientTransformation, mesh: Mesh | None, precision: str | None = None
    ) -> None:
        if mesh is not None:
            # Inside the step the compiler propagates shardings (Auto axes), whatever axes the caller's mesh has.
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
        self.mesh = mesh
        self.tx = tx
        self.precision = precision
        self.compilations = 0
        model = nnx.clone(model)
        model.mesh = mesh
        graph, params, *rest = nnx.split(model, nnx.Param, ...)
        self._graph, self._params, self._rest = graph, params, rest[0]
        abstract = jax.eval_shape(self._fresh, self._params)
        self._sharding = None if mesh is None else jax.tree.map(lambda leaf: _leaf_sharding(leaf.shape, mesh), abstract)
        self._step = jax.jit(self._accumulate_and_update, donate_argnums=0, out_shardings=self._out_shardings())
        self._add = jax.jit(self._add_microbatch, donate_argnums=1)
        self._update = jax.jit(self._divide_and_update, donate_argnums=0, out_shardings=self._out_shardings())

    def init(self) -> TrainState:
        """The state before the first step, from the model's own weights, placed on the mesh."""
        return jax.jit(self._fresh, out_shardings=self._sharding)(self._params)

    @property
    def shapes(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of a state, without its values."""
        return jax.eval_shape(jax.jit(self._fresh, out_shardings=self._sharding), self._params)

    def model(self, state: TrainState) -> Decoder:
        """A model that holds the state's weights, for evaluation or :func:`jax_backend.weights.save`."""
        return nnx.merge(self._graph, state.params, self._rest)

    def __call__(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """Take one optimizer step.

        Args:
            state: what :meth:`init` or the last step returned; its buffers are donated.
            batch: integer ``input_ids``, ``segment_ids``, ``position_ids``, ``targets`` and float ``loss_weights`` (0
                where nothing is trained), each [A, B, S], or [B, S] for a single microbatch.

        Returns:
            The new state and ``loss`` (mean over the weights of the whole step), ``loss_sum``, ``weight_sum``,
            ``grad_norm``, all float32 scalars.

        Raises:
            LayoutError: a key lacks, shapes differ, or the rows do not divide over the devices.
        """
        return self._step(state, self.place(batch))

    def accumulate(self, state: TrainState, sums: Sums | None, batch: Mapping[str, Any]) -> Sums:
        """Add one microbatch [B, S] to the sums of a step whose microbatches differ in shape; ``sums`` is donated.

        Finish the step with :meth:`update`. Each new shape is compiled.
        """
        micro = {key: value[0] for key, value in self.place(batch).items()}
        return self._add(state.params, self._zeros(state.params) if sums is None else sums, micro)

    def update(self, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        """Divide the sums once and take the optimizer step; ``state`` is donated."""
        return self._update(state, sums)

    def place(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Check the batch and put it on the mesh: rows are spread over all its axes."""
        missing = [key for key in BATCH_KEYS if key not in batch]
        if missing:
            raise LayoutError(f"the batch lacks {', '.join(missing)}: jax_backend.to_batch makes all of them")
        shapes = {key: np.shape(batch[key]) for key in BATCH_KEYS}
        if len(set(shapes.values())) != 1 or len(shapes["input_ids"]) not in (2, 3):
            raise LayoutError(f"the batch's arrays must share one shape [A, B, S] or [B, S], got {shapes}")
        arrays = {key: batch[key] if batch[key].ndim == 3 else batch[key][None] for key in BATCH_KEYS}
        if self.mesh is None:
            return {key: jnp.asarray(value) for key, value in arrays.items()}
        rows, devices = shapes["input_ids"][-2], self.mesh.size
        if rows % devices:
            raise LayoutError(
                f"{rows} rows do not divide over {devices} devices: take a multiple of {devices} rows a microbatch"
            )
        spread = NamedSharding(self.mesh, PartitionSpec(None, self.mesh.axis_names, None))
        return {key: jax.device_put(value, spread) for key, value in arrays.items()}

    def _fresh(self, params: nnx.State) -> TrainState:
        return TrainState(params, self.tx.init(params), jnp.zeros((), jnp.int32))

    def _out_shardings(self) -> Any:
        if self.mesh is None:
            return None
        return self._sharding, NamedSharding(self.mesh, PartitionSpec())

    def _loss_sum(self, params: nnx.State, micro: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(self._graph, params, self._rest)
        logits = model(micro["input_ids"], micro["segment_ids"], micro["position_ids"])
        return packed_cross_entropy(logits, micro["targets"], weights=micro["loss_weights"])

    def _zeros(self, params: nnx.State) -> Sums:
        return Sums(jnp.zeros(()), jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params))

    def _add_microbatch(self, params: nnx.State, sums: Sums, micro: dict[str, jax.Array]) -> Sums:
        with nullcontext() if self.precision is None else jax.default_matmul_precision(self.precision):
            (loss, weight), grads = jax.value_and_grad(self._loss_sum, has_aux=True)(params, micro)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, Sums(loss, weight, grads))

    def _divide_and_update(self, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        # One division for the whole step: a mean of the microbatches' means would weigh their tokens unequally.
        share = jnp.where(sums.weight > 0, 1 / jnp.where(sums.weight > 0, sums.weight, 1), 0)
        grads = jax.tree.map(lambda grad: grad * share, sums.grads)
        # Rounded once: float32 gradients would turn the optimizer's moments of bfloat16 weights into float32.
        rounded = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        updates, opt_state = self.tx.update(rounded, state.opt_state, state.params)
        metrics = {
            "loss": sums.loss * share,
            "loss_sum": sums.loss,
            "weight_sum": sums.weight,
            "grad_norm": optax.tree.norm(grads),
        }
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

    def _accumulate_and_update(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        self.compilations += 1  # this body runs when it is traced, not when it is executed

        def add(sums: Sums, micro: dict[str, jax.Array]) -> tuple[Sums, None]:
            return self._add_microbatch(state.params, sums, micro), None

        sums, _ = jax.lax.scan(add, self._zeros(state.params), batch)
        return self._divide_and_update(state, sums)


def make_train_step(
    model: Decoder, tx: optax.GradientTransformation, mesh: Mesh | None = None, *, precision: str | None = None
) -> TrainStep:
    """Build the training step of ``model`` under the optimizer ``tx``.

    The loss is the weighted mean over every trained token of the step, however many microbatches it is cut into and
    however many devices share it: sums are accumulated and divided once.

    Args:
        model: a decoder; its ``param_dtype`` is what the master weights keep, its ``dtype`` what the layers compute in,
            its ``remat`` whether layers are recomputed in the backward.
        tx: an optax transformation.
        mesh: None for one device. Rows are spread over all of the mesh's axes; weights, gradients and the optimizer's
            state are cut over the axis named ``fsdp`` where the mesh has one, and replicated over the others.
        precision: of matrix products, as `jax.default_matmul_precision` names it; None for what is in force. A GPU
            multiplies float32 in TF32 by default: "highest" makes it float32.
    """
    return TrainStep(model, tx, mesh, precision)


def _leaf_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Cut the largest dimension that the ``fsdp`` axis divides; scalars and odd shapes are replicated."""
    parts = mesh.shape.get("fsdp", 1)
    fitting = [axis for axis, size in enumerate(shape) if parts > 1 and size % parts == 0]
    spec: list[str | None] = [None] * len(shape)
    if fitting:
        spec[max(fitting, key=lambda axis: shape[axis])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*spec))
