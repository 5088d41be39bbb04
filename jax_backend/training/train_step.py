"""One optimizer step over packed rows: sums of losses and gradients over microbatches, divided once, then optax.

``make_train_step(model, tx, mesh)`` splits an ``nnx`` model into its structure, which is traced, and a
:class:`TrainState` of plain arrays, which is donated from step to step. Data flows ``[A, B, S]`` batches -> (loss sum,
weight sum, gradient sum) -> one division -> ``tx`` -> new state. Shape letters: A microbatches, B rows, S tokens of a
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_backend.batches import renamed
from jax_backend.model.decoder import Decoder
from jax_backend.placement import (
    head_sharding,
    place_rows,
    put_tree,
    rows_mesh,
    shares_rows,
    token_spec,
    weight_shardings,
    with_sharding,
)
from jax_backend.segments import check_positions
from jax_backend.training.objective import (
    LossFunction,
    cast_weights,
    causal_lm_loss,
    check_compute_dtype,
    check_optimizer,
    check_shared_rows,
    check_variables,
    check_vocabulary,
    checked_sums,
    fold_keys,
    has_microbatches,
    quotient,
    refuse_donated,
    refuse_linen,
)
from packing_core.errors import LayoutError, PackingError, UnsupportedError

Metrics = dict[str, jax.Array]

BATCH_KEYS = ("input_ids", "segment_ids", "position_ids", "targets", "loss_weights")


class TrainState(NamedTuple):
    """Everything that a step changes: float32 master weights, the optimizer's state, the number of steps taken."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array


class Sums(NamedTuple):
    """The sums over a step's microbatches before the one division, all float32 whatever the weights' dtype.

    A bfloat16 sum stops growing once it is 256 times as large as what is added.

    Attributes:
        loss, weight, grads: sums of losses, of their weights, and of gradients.
        extra: the loss function's further values, added up.
        microbatches: int32, how many so far.
    """

    loss: jax.Array
    weight: jax.Array
    grads: nnx.State
    extra: Any
    microbatches: jax.Array


class TrainStep:
    """The training step of ``model`` under the optimizer ``tx``: ``state, metrics = train_step(state, batch)``.

    The loss is the weighted mean over every trained token of the step, however many microbatches it is cut into and
    however many devices share it: sums are accumulated in float32 and divided once. A `Decoder`'s gradients are added
    over tokens and devices in float32 for every dtype of its layers. In other models devices add their shares of a
    weight's gradient in the dtype that its layer computes in, where XLA places that sum;
    `jax_backend.model.linear.Linear` in the place of ``nnx.Linear`` adds them in float32.

    Every call of the step donates the state: its buffers become the next state's, and the old state cannot be used
    again. The model given here, what `trainable` leaves out, and the batch are not donated.

    Dropout draws from the model's own random streams (``nnx.Rngs``), whose keys are folded with the number of the step
    and of the microbatch: a resumed run draws what the uninterrupted one does.

    Args:
        model: a `Decoder` or another ``nnx`` module; it keeps the dtype of its weights. Without ``loss_fn`` a module is
            called with ``input_ids, segment_ids, position_ids`` and returns logits [B, S, V]. Or a function that makes
            a module: `init` then makes the weights where they are kept, and no device ever holds them whole.
        tx: an optax transformation.
        mesh: None for one device. Rows are spread over the mesh's axes; weights, gradients and the optimizer's state
            are cut over the axis named ``fsdp`` where the mesh has one. An axis ``tensor`` cuts the heads and the width
            of the MLPs of a `Decoder` with their weights, and an axis ``context`` the tokens of its rows.
        loss_fn: ``loss_fn(model, batch) -> (loss_sum, weight_sum)`` or ``(loss_sum, weight_sum, extra)`` of one
            microbatch, a dictionary of arrays [B, ...] that may hold any keys. ``extra`` maps a name to a value that is
            added up over microbatches, or to a pair (sum, weight) whose quotient is reported; both go into the metrics.
            Terms that count each token, such as a z-loss, belong into ``loss_sum``.
        trainable: an ``nnx`` filter of the variables that are trained; ``nnx.LoRAParam`` trains LoRA weights alone. The
            others get no gradient and no optimizer state, and are in no checkpoint.
        compute_dtype: what floating-point weights are cast to before each microbatch, gradients staying in the dtype
            of the weights; None leaves that to the model's layers (their ``dtype``). Over ``fsdp`` the cast weights
            are what travels.
        precision: of matrix products, as `jax.default_matmul_precision` names it; None for what is in force. A GPU
            multiplies float32 in TF32 by default: "highest" makes it float32. It covers `evaluate` as well.
        microbatched: True if the first axis of every array counts microbatches, [A, B, ...], and False for [B, ...].
            None reads it from the shape of ``input_ids``; a batch without that key needs True or False.

    Attributes:
        mesh: what rows and weights are spread over, or None.
        tx: the optax transformation.
        precision: of matrix products, or None for what is in force.
        compilations: for how many batch shapes the step was compiled; a new segmentation of a shape adds none.

    Raises:
        UnsupportedModelError: a ``linen`` module, or one with batch statistics, which mix a packed batch's documents.
        PackingError: ``trainable`` selects nothing; ``tx`` is no optax transformation; ``mesh`` is no mesh.
        LayoutError: heads do not divide over ``tensor``.
        UnsupportedError: an axis of the mesh is named for expert or pipeline parallelism, or is ``tensor`` or
            ``context`` and the model cannot be cut so; or ``compute_dtype`` needs a loss scale.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        tx: optax.GradientTransformation,
        mesh: Mesh | None = None,
        *,
        loss_fn: LossFunction | None = None,
        trainable: Any = nnx.Param,
        compute_dtype: Any = None,
        precision: str | None = None,
        microbatched: bool | None = None,
    ) -> None:
        refuse_linen(model)
        check_optimizer(tx)
        check_compute_dtype(compute_dtype)
        self.mesh = mesh = None if mesh is None else rows_mesh(mesh)
        self.tx, self.precision = tx, precision
        self.compute_dtype = compute_dtype
        self.trainable = trainable
        self.microbatched = microbatched
        self.compilations = 0
        self._loss_fn = loss_fn or causal_lm_loss
        self._own_loss = loss_fn is not None
        self._vocabulary: int | None = None
        self._looked = False  # at the segments of a batch
        if isinstance(model, nnx.Module):
            self._make: Callable[[], nnx.Module] | None = None
            self._graph, params, rest = self._split(nnx.clone(model))
            self._params: nnx.State | None = params  # the model's own arrays, not a copy
            self._rest: nnx.State | None = rest if mesh is None else jax.device_put(rest, weight_shardings(rest, mesh))
        else:
            self._make, self._params, self._rest = model, None, None
            self._graph, params, rest = self._split(nnx.eval_shape(model))
        check_variables(params, rest)
        self._rest_shapes = jax.eval_shape(lambda rest: rest, rest)
        self._rest_shardings = weight_shardings(rest, mesh)
        self.shapes: TrainState = jax.eval_shape(self._fresh, params)
        self._shardings: Any = weight_shardings(self.shapes, mesh)
        out: Any = None
        sums: Any = None
        if mesh is not None:
            self.shapes = jax.tree.map(with_sharding, self.shapes, self._shardings)
            self._rest_shapes = jax.tree.map(with_sharding, self._rest_shapes, self._rest_shardings)
            whole: Any = NamedSharding(mesh, PartitionSpec())
            out, sums = (self._shardings, whole), Sums(whole, whole, self._shardings.params, whole, whole)
        self._step = jax.jit(self._accumulate_and_update, donate_argnums=0, out_shardings=out)
        self._zeros = jax.jit(self._start, out_shardings=sums)
        self._add = jax.jit(self._add_all, donate_argnums=2, out_shardings=sums)
        self._update = jax.jit(self._divide_and_update, donate_argnums=0, out_shardings=out)
        self._evaluate = jax.jit(self._evaluation)

    def init(self, *, donate: bool = False) -> TrainState:
        """The state before the first step: the model's own weights, or those that its function makes, on the mesh.

        A function's weights are made on the devices that keep them. A model's weights are copied, so that the model
        stays usable and ``init`` can be called again; with ``donate`` they become the state's, without a second copy.

        Raises:
            PackingError: the model's weights were donated before.
        """
        if self._make is not None:
            make, shardings = self._make, self._shardings and self._shardings.params
            params = jax.jit(lambda: self._split(make())[1], out_shardings=shardings)()
        elif self._params is None:
            raise PackingError("init(donate=True) gave the model's weights away: build a new step from a new model")
        else:
            params = put_tree(self._params, self._shardings and self._shardings.params, donate=donate)
            self._params = None if donate else self._params
        opt_state = jax.jit(self.tx.init, out_shardings=self._shardings and self._shardings.opt_state)(params)
        return TrainState(
            params, opt_state, put_tree(jnp.zeros((), jnp.int32), self._shardings and self._shardings.step)
        )

    def model(self, state: TrainState) -> Any:
        """A model that holds the state's weights, for evaluation or :func:`jax_backend.model.weights.save`.

        It shares the state's arrays: the next step donates them, so use the model before it.
        """
        refuse_donated(state)
        return nnx.merge(self._graph, state.params, self._others())

    def __call__(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
        """Take one optimizer step.

        Args:
            state: what :meth:`init` or the last step returned; its buffers are donated.
            batch: of `to_batch`, `GrainSource` or MaxText: integer ``input_ids``, ``segment_ids``, ``position_ids``,
                ``targets`` and float ``loss_weights`` (0 where nothing is trained), each [A, B, S], or [B, S] for a
                single microbatch. In a job of several processes the rows are this process's own, as many in each.

        Returns:
            The new state and ``loss`` (mean over the weights of the whole step), ``loss_sum``, ``weight_sum``,
            ``grad_norm``, all float32 scalars.

        Raises:
            LayoutError: a key lacks, shapes differ, the rows do not divide over the devices, or an id is not in the
                vocabulary of a `Decoder` (ids that are in a device's memory already are not looked at).
            PackingError: an earlier step took the state's buffers.
        """
        refuse_donated(state)
        return self._step(state, self._others(), self.place(batch))

    def accumulate(self, state: TrainState, sums: Sums | None, batch: Mapping[str, Any]) -> Sums:
        """Add a microbatch [B, S], or several [A, B, S], to the sums of a step whose microbatches differ in shape.

        ``sums`` is donated. Finish the step with :meth:`update`. Each new shape is compiled.
        """
        refuse_donated((state, sums))
        rest, batch = self._others(), self.place(batch)
        sums = self._zeros(state.params, rest, batch) if sums is None else sums
        return self._add(state, rest, sums, batch)

    def update(self, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        """Divide the sums once and take the optimizer step; ``state`` is donated."""
        refuse_donated((state, sums))
        return self._update(state, sums)

    def evaluate(self, state: TrainState, batches: Iterable[Mapping[str, Any]]) -> Metrics:
        """The loss of batches [B, S] or [A, B, S] as a step counts it, the model in evaluation mode; nothing changes.

        Returns:
            ``loss`` (mean over the weights of all batches), ``loss_sum`` and ``weight_sum``, float32 scalars.
        """
        refuse_donated(state)
        total = weight = jnp.zeros(())
        for batch in batches:
            more, heavier = self._evaluate(state, self._others(), self.place(batch))
            total, weight = total + more, weight + heavier
        return {"loss": quotient((total, weight)), "loss_sum": total, "weight_sum": weight}

    def compile(
        self, *, rows: int, tokens: int, microbatches: int = 1, more: Mapping[str, Any] | None = None
    ) -> jax.stages.Compiled:
        """The step for batches of one shape, compiled for its ``memory_analysis()`` and the like; nothing is allocated.

        Args:
            rows: of all processes.
            more: the keys of its own that a ``loss_fn`` reads, each with an array of a microbatch, [rows, ...], or its
                ``jax.ShapeDtypeStruct``.

        Raises:
            PackingError: the ``loss_fn`` reads a key that is not among them.
        """
        spread = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(None, *token_spec(self.mesh)))
        shape = (microbatches, rows, tokens)
        dtypes = {key: jnp.float32 if key == "loss_weights" else jnp.int32 for key in BATCH_KEYS}
        batch = {key: jax.ShapeDtypeStruct(shape, dtype, sharding=spread) for key, dtype in dtypes.items()}
        by_row = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(None, token_spec(self.mesh)[0]))
        for key, like in (more or {}).items():
            batch[key] = jax.ShapeDtypeStruct((microbatches, *like.shape), like.dtype, sharding=by_row)
        try:
            return self._step.lower(self.shapes, self._rest_shapes, batch).compile()
        except KeyError as error:
            if not self._own_loss:
                raise
            raise PackingError(f"loss_fn reads batch[{error}]: pass compile(more={{{error}: ...}}) an array") from error

    def place(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Check the batch and put it on the mesh: this process's rows are spread over its devices."""
        batch = batch if self._own_loss else renamed(batch)
        if missing := [] if self._own_loss else [key for key in BATCH_KEYS if key not in batch]:
            raise LayoutError(f"the batch lacks {', '.join(missing)}: jax_backend.to_batch makes all of them")
        keys = tuple(batch) if self._own_loss else BATCH_KEYS
        shapes = {key: np.shape(batch[key]) for key in keys}
        if not self._own_loss and (len(set(shapes.values())) != 1 or len(shapes["input_ids"]) not in (2, 3)):
            raise LayoutError(f"the batch's arrays must share one shape [A, B, S] or [B, S], got {shapes}")
        if self._vocabulary is not None:
            check_vocabulary(batch, self._vocabulary)
        if not self._own_loss and not (self._looked and isinstance(batch["segment_ids"], jax.Array)):
            check_positions(batch["segment_ids"], batch["position_ids"])
            self._looked = True  # later batches on a device are not waited for
        single = not has_microbatches(shapes, self.microbatched)
        arrays = {key: batch[key][None] if single else batch[key] for key in keys}
        leading = {key: np.shape(array)[:2] for key, array in arrays.items()}
        if len(set(leading.values())) != 1 or len(next(iter(leading.values()))) != 2:
            raise LayoutError(f"the batch's arrays must share their first axes, microbatches and rows, got {shapes}")
        if self.mesh is None:
            return {key: jnp.asarray(value) for key, value in arrays.items()}
        return place_rows(arrays, self.mesh, by_token=BATCH_KEYS)

    def _split(self, model: Any) -> tuple[Any, nnx.State, nnx.State]:
        shared = self.mesh is not None and shares_rows(self.mesh)
        if isinstance(model, Decoder):
            model.mesh = self.mesh
            if self.mesh is not None and shared:
                model.mesh = head_sharding(self.mesh)
                check_shared_rows(model, self.mesh)
            self._vocabulary = None if self._own_loss else model.config.vocab_size
        elif shared:
            raise UnsupportedError(
                f"the axes tensor and context cut the heads and tokens of a Decoder, and this is a "
                f"{type(model).__name__}: name them data or fsdp; context_attention cuts rows in a model of your own"
            )
        graph, params, *rest = nnx.split(model, self.trainable, ...)
        return graph, params, rest[0]

    def _others(self) -> nnx.State:
        """Places what the model holds besides its weights on the mesh."""
        if self._rest is None:
            make = self._make
            assert make is not None
            self._rest = jax.jit(lambda: self._split(make())[2], out_shardings=self._rest_shardings)()
        return self._rest

    def _fresh(self, params: nnx.State) -> TrainState:
        return TrainState(params, self.tx.init(params), jnp.zeros((), jnp.int32))

    def _loss_sum(
        self, params: nnx.State, rest: nnx.State, micro: dict[str, jax.Array], step: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        rest = fold_keys(rest, step, number)
        if self.compute_dtype is not None:
            params, rest = cast_weights((params, rest), self.compute_dtype)
        loss, weight, extra = checked_sums(self._loss_fn(nnx.merge(self._graph, params, rest), micro))
        return loss, (weight, extra)

    def _evaluation(
        self, state: TrainState, rest: nnx.State, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        params, rest = state.params, fold_keys(rest, state.step)
        if self.compute_dtype is not None:
            params, rest = cast_weights((params, rest), self.compute_dtype)

        def sums(micro: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(self._graph, params, rest)
            model.eval()
            loss, weight, _ = checked_sums(self._loss_fn(model, micro))
            return loss.astype(jnp.float32), weight.astype(jnp.float32)

        with self._multiplying():
            losses, weights = jax.lax.map(sums, batch)
        return losses.sum(), weights.sum()

    def _start(self, params: nnx.State, rest: nnx.State, batch: dict[str, jax.Array]) -> Sums:
        """Sums of no microbatch."""
        extra: Any = {}
        if self._own_loss:
            micro = jax.tree.map(lambda x: x[0], batch)
            zero = jnp.zeros((), jnp.int32)
            extra = jax.eval_shape(self._loss_sum, params, rest, micro, zero, zero)[1][1]
        grads, extra = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (params, extra))
        return Sums(jnp.zeros(()), jnp.zeros(()), grads, extra, jnp.zeros((), jnp.int32))

    def _add_all(self, state: TrainState, rest: nnx.State, sums: Sums, batch: dict[str, jax.Array]) -> Sums:
        def add(sums: Sums, micro: dict[str, jax.Array]) -> tuple[Sums, None]:
            return self._add_microbatch(state, rest, sums, micro), None

        if len(next(iter(batch.values()))) == 1:  # a loop over one microbatch would still keep and copy its sums
            return add(sums, {key: value[0] for key, value in batch.items()})[0]
        return jax.lax.scan(add, sums, batch)[0]

    def _add_microbatch(self, state: TrainState, rest: nnx.State, sums: Sums, micro: dict[str, jax.Array]) -> Sums:
        gradient = jax.value_and_grad(self._loss_sum, has_aux=True)
        with self._multiplying():
            (loss, (weight, extra)), grads = gradient(state.params, rest, micro, state.step, sums.microbatches)
        found = Sums(loss, weight, grads, extra, jnp.ones((), jnp.int32))
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, found)

    def _multiplying(self) -> AbstractContextManager[Any]:
        """Sets the precision of matrix products."""
        return nullcontext() if self.precision is None else jax.default_matmul_precision(self.precision)

    def _divide_and_update(self, state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        # One division for the whole step: a mean of the microbatches' means would weigh their tokens unequally.
        # Weights may be negative (advantages), and so may their sum.
        share = quotient((jnp.ones(()), sums.weight))
        grads = jax.tree.map(lambda grad: grad * share, sums.grads)
        # Rounded once: float32 gradients would turn the optimizer's moments of bfloat16 weights into float32.
        rounded = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        # optax's own arithmetic promotes, which is no mistake of a shop that lets JAX raise at it
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, opt_state = self.tx.update(rounded, state.opt_state, state.params)
        metrics = {
            "loss": sums.loss * share,
            "loss_sum": sums.loss,
            "weight_sum": sums.weight,
            "grad_norm": optax.tree.norm(grads),
        }
        metrics |= {name: quotient(value) for name, value in sums.extra.items()}
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

    def _accumulate_and_update(
        self, state: TrainState, rest: nnx.State, batch: dict[str, jax.Array]
    ) -> tuple[TrainState, Metrics]:
        self.compilations += 1  # this body runs when it is traced, not when it is executed
        sums = self._add_all(state, rest, self._start(state.params, rest, batch), batch)
        return self._divide_and_update(state, sums)


make_train_step = TrainStep
