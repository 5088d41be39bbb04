"""The conformance adapter: jax_backend seen through ``packing_core.protocol``.

``jax:xla`` takes part at all four levels; the other names differ in nothing but the attention, so they take part with
the operation and the model that depend on it. Data flows numpy float32 -> the named dtype -> jax_backend -> numpy
float32.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_backend.attention import IMPLEMENTATIONS, PARTITIONED, segment_attention
from jax_backend.attention.selection import select_keys
from jax_backend.batches import to_batch
from jax_backend.compilation import compile_quickly
from jax_backend.conformance.operations import RULES, out_and_gradients
from jax_backend.conformance.reductions import DocumentMethods, arithmetic
from jax_backend.conformance.scans import ScanMethods
from jax_backend.context_parallel import context_attention
from jax_backend.losses.cross_entropy import packed_cross_entropy, shift_labels
from jax_backend.model import weights
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.model.rope import apply_rope
from jax_backend.model.rope_scaling import RopeParameters
from jax_backend.training.train_step import TrainStep, make_train_step
from packing_core import protocol
from packing_core.errors import UnsupportedError
from packing_core.protocol import (
    Array,
    Backend,
    BackendFactory,
    Batch,
    Capabilities,
    Document,
    Gradients,
    OperationCall,
    takes_call,
)
from packing_core.protocol.backend import PackingMethods, pack_documents

_LACKING = {"alibi", "both_ways", "dynamic_rope", "nonfinite_padding", "context_parallel", "channel_decay"}
_LACKING |= {"continued_segments", "selected_blocks"}
_ALL = protocol.ALL_OPTIONS - _LACKING - {"selected_keys"}
_RANKS = 4  # devices that a CPU is split into, as many as the suite wants ranks
_PLAIN = _ALL - {"sinks"}  # without a differentiable log-sum-exp there are no sinks


def backends() -> Mapping[str, BackendFactory]:
    """The backends of the entry point ``jax``, one per attention implementation; a CPU compiles quickly."""
    compile_quickly()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):  # JAX runs already: requirements about ranks then take a process of their own
            _have_devices(_RANKS)
    return {name: partial(_make, name) for name in IMPLEMENTATIONS}


def capabilities(implementation: str, platform: str) -> Capabilities:
    """Declares the capabilities of one implementation on "cpu", "gpu" or "tpu"."""
    interpreted = platform == "cpu"
    atomic = platform == "gpu"  # XLA's scatter-add, which the embedding's gradient is
    match implementation:
        case "pallas":
            return Capabilities(options=_ALL, head_dims=range(1, 257), interpreted=interpreted, atomic_embedding=atomic)
        case "cudnn":
            options = _PLAIN - {"window", "softcap", "narrow_values", "sliding_window"}
            return Capabilities(("bfloat16", "float16"), options, range(8, 129, 8), atomic_backward=True)
        case "tpu":
            return Capabilities(("float32", "bfloat16"), _PLAIN, interpreted=interpreted)
    # Ranks are devices, of which a CPU has as many as a process asks for.
    options = _ALL if platform == "cpu" else _ALL - {"ranks"}
    if implementation == "chunked":
        options = options | {"nonfinite_padding"} | ({"context_parallel"} if platform == "cpu" else set())
    if implementation in PARTITIONED:
        options = options | {"selected_keys"}
    return Capabilities(options=options, atomic_embedding=atomic)


def _make(implementation: str) -> Backend:
    platform = jax.default_backend()
    if implementation == "cudnn" and platform != "gpu":
        raise UnsupportedError(f"cuDNN needs an NVIDIA GPU, and JAX runs on {platform} here")
    if implementation == "tpu" and platform == "gpu":
        raise UnsupportedError("splash attention is a TPU kernel, and JAX runs on gpu here")
    return (JaxStack if implementation == "xla" else JaxAttentionStack)(implementation, platform)


class JaxAttentionStack(Backend):
    """The levels that depend on the attention implementation: attention itself and a model's forward and backward."""

    def __init__(self, implementation: str, platform: str) -> None:
        self.implementation = implementation
        self.capabilities = capabilities(implementation, platform)
        self.description = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
        if self.capabilities.interpreted:
            self.description += ", interpreted"

    @takes_call("q", "k", "v", "sinks")
    def attention(self, call: OperationCall) -> tuple[Array, Gradients]:
        ids, options = np.asarray(call.segment_ids, np.int32), {**call.options, "implementation": self.implementation}
        for name, words in (("alibi_slopes", "ALiBi"), ("spans", "spans that see both ways")):
            if options.pop(name, None) is not None:
                raise UnsupportedError(f"segment_attention has no {words}")
        if options.pop("index_block", 1) > 1:
            raise UnsupportedError("select_keys has no blocks")
        index = [options.pop(name, None) for name in ("index_q", "index_k", "index_weights")]
        ranks, top_k = options.pop("context_ranks", 1), options.pop("top_k", None)
        taken = ["context_parallel"] * (ranks > 1) + ["selected_keys"] * (top_k is not None)
        protocol.require_declared(self, dtype=call.dtype, options=taken)
        options["dtype"] = call.dtype
        if self.implementation == "cudnn":
            options["max_segments"] = _segments_cap(call.segment_ids)
        if top_k is not None:
            return out_and_gradients(_attend_selected, call.operands, call.dout, ids, *index, top_k=top_k, **options)
        if ranks == 1:
            return out_and_gradients(_attend, call.operands, call.dout, ids, **options)
        arguments = _attend_in_slices, call.operands, call.dout, ids
        return _with_devices(ranks, out_and_gradients, *arguments, ranks=ranks, **options)

    def forward(self, decoder: protocol.Decoder, batch: Batch, *, dtype: str) -> Array:
        graph, params, rest = self._model(decoder, dtype, batch)
        with arithmetic(dtype):
            logits = _logits(graph, params, rest, *_model_inputs(batch))
        return np.asarray(logits, np.float32)

    def gradients(self, decoder: protocol.Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        graph, params, rest = self._model(decoder, dtype, batch)
        with arithmetic(dtype):
            loss, found = _loss_and_gradients(graph, params, rest, *_model_inputs(batch), jnp.asarray(batch.labels))
        return float(loss), {name: np.asarray(x, np.float32) for name, x in weights.export(found).items()}

    def _model(self, decoder: protocol.Decoder, dtype: str, batch: Batch) -> tuple[Any, Any, Any]:
        """The suite's decoder, in the parts that a traced function takes; in ``dtype`` from float32 weights."""
        cap = _segments_cap(batch.segment_ids) if self.implementation == "cudnn" else None
        graph, params, rest = _parts(self._config(decoder, dtype), dtype, self.implementation, cap)
        weights.assign(params, decoder.weights)
        return graph, params, rest

    def _config(self, decoder: protocol.Decoder, dtype: str) -> DecoderConfig:
        """The suite's config under this backend's names.

        Raises:
            UnsupportedError: it asks for what is not declared.
        """
        theirs = decoder.config
        protocol.require_declared(
            self,
            dtype=dtype,
            options=["sliding_window"] * (theirs.sliding_window is not None)
            + ["dynamic_rope"] * (theirs.dynamic_rope_factor is not None),
            head_dim=theirs.head_dim,
        )
        return DecoderConfig(
            model_type="llama",
            vocab_size=theirs.vocab_size,
            hidden_size=theirs.hidden_size,
            intermediate_size=theirs.intermediate_size,
            num_attention_heads=theirs.num_attention_heads,
            num_key_value_heads=theirs.num_key_value_heads,
            head_dim=theirs.head_dim,
            windows=(theirs.sliding_window,) * theirs.num_hidden_layers,
            rope=RopeParameters(
                theirs.head_dim,
                (("rope_theta", theirs.rope_theta), ("rope_type", "default")),
                theirs.max_position_embeddings,
            ),
            rms_norm_eps=theirs.rms_norm_eps,
            tie_word_embeddings=theirs.tie_word_embeddings,
        )


class JaxStack(JaxAttentionStack, DocumentMethods, ScanMethods, PackingMethods):
    """Everything: the attention's levels, and the operations and the trainer that do not depend on it."""

    @takes_call("x")
    def rope(self, call: OperationCall) -> tuple[Array, Gradients]:
        options = dict(call.options)
        where = np.asarray(options.pop("position_ids"), np.int32), options.pop("inv_freq")
        return out_and_gradients(_turn, call.operands, call.dout, *where, dtype=call.dtype, **options)

    def loss(
        self,
        logits: Array,
        labels: Array,
        segment_ids: Array,
        *,
        dtype: str,
        token_weights: Array | None = None,
    ) -> tuple[float, float, Array]:
        # The weight of a label travels with it to the token before, which predicts it.
        moved = None if token_weights is None else np.roll(token_weights, -1, axis=1)
        given = (np.asarray(x, np.int32) for x in (labels, segment_ids))
        with arithmetic(dtype):
            (loss, weight), gradient = _loss_sum_and_gradient(np.asarray(logits, jnp.dtype(dtype)), *given, moved)
        return float(loss), float(weight), np.asarray(gradient, np.float32)

    def train(
        self,
        decoder: protocol.Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        capacity: int,
        learning_rate: float,
        dtype: str,
        optimizer: str = "sgd",
        ranks: int = 1,
    ) -> tuple[list[float], dict[str, Array]]:
        how = (self._config(decoder, dtype), dtype, optimizer, learning_rate, ranks)
        if ranks == 1:
            return _train(how, decoder.weights, steps, capacity)
        protocol.require_declared(self, options=["ranks"])
        return _with_devices(ranks, _train, how, dict(decoder.weights), steps, capacity)


def _segments_cap(segment_ids: Array) -> int:
    """A power of two that no row's number of segments passes, so that few caps are compiled."""
    most = max(np.bincount([row for row, _, _ in protocol.segments(segment_ids)], minlength=1))
    return 1 << int(most).bit_length()


def _decoder(config: DecoderConfig, dtype: str, implementation: str, max_segments: int | None = None) -> Decoder:
    return Decoder(
        config,
        rngs=nnx.Rngs(0),
        dtype=jnp.dtype(dtype),
        implementation=implementation,
        max_segments=max_segments,
        scan_layers=config.num_hidden_layers > 2,  # the suite's deep decoder, to compile one of its layers
        contain_nonfinite=True,
    )


@lru_cache(maxsize=8)
def _parts(config: DecoderConfig, dtype: str, implementation: str, max_segments: int | None) -> tuple[Any, Any, Any]:
    """A decoder's graph, its weights, which each call fills anew, and the rest; drawing weights takes a while."""
    graph, params, *rest = nnx.split(_decoder(config, dtype, implementation, max_segments), nnx.Param, ...)
    return graph, params, rest[0]


def _with_devices(count: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function where JAX has so many devices; a process settles that when JAX starts, so perhaps in another."""
    if len(jax.devices()) >= count:
        return function(*arguments, **keywords)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_have_devices, initargs=(count,)) as elsewhere:
        return elsewhere.submit(function, *arguments, **keywords).result()


def _have_devices(count: int) -> None:
    jax.config.update("jax_num_cpu_devices", count)


def _train(
    how: tuple[DecoderConfig, str, str, float, int],
    start: Mapping[str, Array],
    steps: Sequence[Sequence[Sequence[Document]]],
    capacity: int,
) -> tuple[list[float], dict[str, Array]]:
    """Train from the weights ``start``; ``how`` are the arguments of `_train_step`."""
    train_step, ranks = _train_step(*how), how[-1]
    state, losses = train_step.init(), []
    weights.assign(state.params, start)
    for microbatches in steps:
        sums = None
        batches = [to_batch(pack_documents(documents, capacity)) for documents in microbatches]
        for first in range(0, len(batches), ranks):
            sums = train_step.accumulate(state, sums, _side_by_side(batches[first : first + ranks], ranks))
        assert sums is not None
        state, metrics = train_step.update(state, sums)
        losses.append(float(metrics["loss"]))
    return losses, {name: np.asarray(x, np.float32) for name, x in weights.export(state.params).items()}


def _side_by_side(batches: Sequence[Mapping[str, Array]], ranks: int) -> dict[str, Array]:
    """One batch of which every rank's device gets the rows of one microbatch, filled up with rows of padding."""
    joined = {}
    for key, like in batches[0].items():
        rows = np.zeros((ranks, max(len(batch[key]) for batch in batches), like.shape[1]), like.dtype)
        for rank, batch in enumerate(batches):
            rows[rank, : len(batch[key])] = batch[key]
        joined[key] = rows.reshape(-1, like.shape[1])
    return joined


@lru_cache(maxsize=8)
def _train_step(config: DecoderConfig, dtype: str, optimizer: str, learning_rate: float, ranks: int) -> TrainStep:
    """Makes one step for all runs of a shape, so that it is compiled once; the weights are arguments."""
    mesh = None if ranks == 1 else jax.make_mesh((ranks,), ("data",))
    precision = "highest" if dtype == "float32" else None
    return make_train_step(_decoder(config, dtype, "xla"), RULES[optimizer](learning_rate), mesh, precision=precision)


def _attend(operands: dict[str, Any], segment_ids: jax.Array, **options: Any) -> jax.Array:
    return segment_attention(**operands, segment_ids=segment_ids, contain_nonfinite=True, **options)


def _attend_selected(
    operands: dict[str, Any],
    segment_ids: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    index_weights: jax.Array,
    *,
    top_k: int,
    **options: Any,
) -> jax.Array:
    selected = select_keys(index_q, index_k, index_weights, segment_ids, top_k=top_k)
    return _attend(operands, segment_ids, selected=selected, **options)


def _attend_in_slices(operands: dict[str, Any], segment_ids: jax.Array, *, ranks: int, **options: Any) -> jax.Array:
    """Every rank holds neighbouring tokens of all rows, and keys travel around."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
    return context_attention(**operands, segment_ids=segment_ids, mesh=mesh, method="ring", **options)


def _turn(operands: dict[str, Any], position_ids: jax.Array, inv_freq: jax.Array, **options: Any) -> jax.Array:
    return apply_rope(operands["x"], position_ids, inv_freq, **options)


@jax.jit
def _loss_sum_and_gradient(
    logits: jax.Array, labels: jax.Array, segment_ids: jax.Array, token_weights: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    def loss_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return packed_cross_entropy(logits, shift_labels(labels, segment_ids), weights=token_weights)

    return jax.value_and_grad(loss_sum, has_aux=True)(logits)


def _model_inputs(batch: Batch) -> tuple[Array, ...]:
    return tuple(np.asarray(x, np.int32) for x in (batch.input_ids, batch.segment_ids, batch.position_ids))


@partial(jax.jit, static_argnums=0)
def _logits(graph: Any, params: Any, rest: Any, *inputs: jax.Array) -> jax.Array:
    return nnx.merge(graph, params, rest)(*inputs)


@partial(jax.jit, static_argnums=0)
def _loss_and_gradients(
    graph: Any,
    params: Any,
    rest: Any,
    input_ids: jax.Array,
    segment_ids: jax.Array,
    position_ids: jax.Array,
    labels: jax.Array,
) -> tuple[jax.Array, Any]:
    def mean_loss(params: Any) -> jax.Array:
        logits = nnx.merge(graph, params, rest)(input_ids, segment_ids, position_ids)
        loss, weight = packed_cross_entropy(logits, shift_labels(labels, segment_ids))
        return jnp.where(weight != 0, loss, 0) / jnp.where(weight != 0, weight, 1)

    return jax.value_and_grad(mean_loss)(params)
