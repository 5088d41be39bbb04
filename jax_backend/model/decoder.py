"""A flax ``nnx`` decoder of the families in ``decoder_config`` that reads packed rows.

Data flows ``input_ids, segment_ids, position_ids -> hidden states -> logits``. Attributes carry the names of the
Hugging Face checkpoints, so that ``weights.py`` maps a parameter by its path. Shape letters: B rows, S tokens of a
row, M hidden size, N query heads, K key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_backend.attention import segment_attention
from jax_backend.attention.request import SAVED
from jax_backend.attention.sharding import platform_of
from jax_backend.context_parallel import context_attention
from jax_backend.losses.cross_entropy import packed_cross_entropy
from jax_backend.losses.output_layer import linear_cross_entropy
from jax_backend.model.decoder_config import DecoderConfig as DecoderConfig
from jax_backend.model.decoder_config import LayerKind
from jax_backend.model.layers import IN_PLACE, Layer, Maker, no_balance
from jax_backend.model.linear import PLAIN
from jax_backend.model.moe import Balance
from jax_backend.model.rope import apply_rope
from jax_backend.placement import auto_axes, explicit_mesh, spec_of, takes_explicit_axes
from jax_backend.segments import check_positions, find_segments
from packing_core.errors import PackingError, UnsupportedError

_DOTS = checkpoint_policies.dots_with_no_batch_dims_saveable
_WIDE = 2  # times as many columns out of a product as into it
_INPUT = "layer input"
# Layers of a decoder on a CPU that are stacked from here on. A step's compilation took 20 s with 24 layers of width 64
# one by one and 6 s scanned, 7.5 s and 5.7 s with 8 layers; up to 4 layers one by one is as quick. On a GPU 24 layers
# compile in 19 s instead of 9, and train 8% faster one by one.
SCANNED_FROM = 12
_BY_NAME = checkpoint_policies.save_only_these_names


def _narrow_dots(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Keeps products of activations and weights that are at most twice as wide as the activations."""
    if not _DOTS(primitive, *operands, **params):
        return False
    (left, right), _ = params["dimension_numbers"]
    width = math.prod(operands[0].shape[i] for i in left)
    columns = math.prod(size for i, size in enumerate(operands[1].shape) if i not in right)
    return columns <= _WIDE * width


# What a recomputed layer keeps for its backward. The first four are the levels of torch_backend's ``memory``;
# "attention" is what the attention's own backward reads of its forward.
REMAT: dict[str, Any] = {
    "none": None,
    "selective": checkpoint_policies.save_from_both_policies(_narrow_dots, _BY_NAME(IN_PLACE, SAVED)),
    "full": checkpoint_policies.nothing_saveable,
    "offload": checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "attention": _BY_NAME(SAVED),
    "dots": checkpoint_policies.save_from_both_policies(_DOTS, _BY_NAME(IN_PLACE)),
    "dots_and_attention": checkpoint_policies.save_from_both_policies(_DOTS, _BY_NAME(IN_PLACE, SAVED)),
}


class Model(nnx.Module):
    """Embedding, layers and the last norm: everything that a checkpoint keeps under ``model.``.

    Attributes:
        blocks: of scanned layers, the layers of one period of kinds, each with a leading axis of repetitions on
            its weights: layer ``r * period + j`` is repetition r of block j. Empty otherwise.
        layers: the layers after those.
    """

    def __init__(self, config: DecoderConfig, make: Maker, scan_layers: bool) -> None:
        self.embed_tokens = make.embed(config.vocab_size, config.hidden_size)
        kinds = config.layers
        period, repeats = _repetition(kinds) if scan_layers else (0, 0)
        self.blocks = nnx.List([make.stacked(config, kind, repeats) for kind in kinds[:period]])
        self.layers = nnx.List([Layer(config, kind, make) for kind in kinds[period * repeats :]])
        self.norm = make.norm(config.hidden_size)


def _repetition(kinds: tuple[LayerKind, ...]) -> tuple[int, int]:
    """The shortest period of the layers' kinds, and how often it repeats as a whole."""
    for period in range(1, len(kinds) + 1):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return period, len(kinds) // period
    raise AssertionError("a sequence repeats itself after its length")


def scans(config: DecoderConfig, platform: str) -> bool:
    """Returns whether ``scan_layers=None`` stacks a decoder's layers."""
    return platform == "cpu" and len(config.layers) >= SCANNED_FROM


def _takes_explicit_axes(results: Callable[[PartitionSpec], Any]) -> Callable[[Any], Any]:
    """`takes_explicit_axes` for methods: the weights are operands too, and kernels are told how the rows are spread.

    Args:
        results: from how the rows are spread, P(rows), to how what the method returns is.
    """

    def decorate(method: Any) -> Any:
        @wraps(method)
        def run(self: Decoder, *operands: Any) -> Any:
            graph, weights, *others = nnx.split(self, nnx.Param, ...)
            rest = others[0]
            mesh = explicit_mesh((weights, operands))
            if mesh is None:
                return method(self, *operands)
            if jax.tree.leaves(rest):
                raise UnsupportedError(
                    "the Decoder holds random streams or other state, which a call over explicit axes would not keep: "
                    "train by make_train_step(model, tx, mesh), which takes any mesh"
                )
            rows = PartitionSpec(spec_of(jax.tree.leaves(operands)[0])[0])

            @takes_explicit_axes(lambda given: results(rows))
            def call(weights: nnx.State, operands: tuple[Any, ...]) -> Any:
                model = nnx.merge(graph, weights, rest)
                if isinstance(self.mesh, Mesh):
                    model.mesh = auto_axes(self.mesh)
                else:
                    model.mesh = NamedSharding(
                        auto_axes(mesh) if isinstance(mesh, Mesh) else jax.sharding.get_abstract_mesh(), rows
                    )
                return method(model, *operands)

            return call(weights, operands)

        return run

    return decorate


class Decoder(nnx.Module):
    """A causal language model over packed rows.

    Args:
        config: the hyperparameters.
        rngs: initialises the weights (normal, ``initializer_range``; norms one, biases zero), as transformers does.
        dtype: what the layers compute in; norm statistics, rotary angles and logits' softmax stay float32.
        param_dtype: what the weights are kept in; float32 master weights with ``dtype=jnp.bfloat16`` is mixed
            precision.
        remat: what each layer recomputes in the backward instead of keeping it: False or "none" for nothing, True or
            "full" for everything; "selective" recomputes all but the attention and products of activations and weights
            that are at most twice as wide as the activations, "offload" everything, from inputs of the layers that
            wait in the host's memory; "attention" all but the attention, "dots" all but products of activations and
            weights, "dots_and_attention" all but both.
        scan_layers: run the layers in a `jax.lax.scan` over stacked weights, so that compile time does not grow with
            their number; None for that on a CPU from `SCANNED_FROM` layers on, and one by one elsewhere. The attribute
            holds what was chosen. `load`, `save` and `restore_state` take either's weights.
        implementation: of :func:`~jax_backend.attention.segment_attention`; None follows its measured order.
        contain_nonfinite: of `segment_attention`: NaN of one document stays out of the others. `audit` turns it on.
        max_segments: most segments that a row may hold, which ``implementation="cudnn"`` needs.
        mesh: the mesh that rows are spread over, or the sharding of queries [B, S, N, D], which may spread tokens and
            heads, each over one axis; handed to the attention and the loss.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: bool | str = False,
        scan_layers: bool | None = None,
        implementation: str | None = None,
        contain_nonfinite: bool = False,
        max_segments: int | None = None,
        mesh: Mesh | NamedSharding | None = None,
    ) -> None:
        if not (mesh is None or isinstance(mesh, Mesh | NamedSharding)):
            raise PackingError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
        if not isinstance(remat, bool) and remat not in REMAT:
            raise PackingError(f"remat is {remat!r}: pass True, False or one of {', '.join(REMAT)}")
        make = Maker(config, rngs, dtype, param_dtype)
        self.scan_layers = scans(config, platform_of(None, mesh)) if scan_layers is None else scan_layers
        self.model = Model(config, make, self.scan_layers)
        self.lm_head = (
            None if config.tie_word_embeddings else make.linear(config.hidden_size, config.vocab_size, use_bias=False)
        )
        self.config = config
        self.remat = remat
        self.implementation = implementation
        self.contain_nonfinite = contain_nonfinite
        self.max_segments = max_segments
        self.mesh = mesh

    def hidden(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Last hidden states [B, S, M] of integer ``input_ids``, ``segment_ids`` and ``position_ids`` [B, S]."""
        return self.hidden_and_balance(input_ids, segment_ids, position_ids)[0]

    @_takes_explicit_axes(lambda rows: (rows, PartitionSpec()))
    def hidden_and_balance(
        self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array
    ) -> tuple[jax.Array, Balance]:
        """Last hidden states [B, S, M], and how the routers of all sparse layers spread the real tokens."""
        config = self.config
        check_positions(segment_ids, position_ids)

        def rotate(q_BSND: jax.Array, k_BSKD: jax.Array, *, local: bool) -> tuple[jax.Array, ...]:
            frequencies, scale = turns[local and config.local_rope is not None]
            with jax.named_scope("rope"):
                return tuple(apply_rope(x, position_ids, frequencies, scale=scale) for x in (q_BSND, k_BSKD))

        def attend(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, **own: Any) -> jax.Array:
            options = {
                "scale": config.attention_scale,
                "softcap": config.attention_softcap,
                "implementation": self.implementation,
                "contain_nonfinite": self.contain_nonfinite,
                **own,
            }
            if isinstance(self.mesh, NamedSharding) and tokens:
                over = {"mesh": self.mesh.mesh, "axis": tokens, "rows": rows, "heads": heads}
                return context_attention(q_BSND, k_BSKD, v_BSKD, segment_ids, **over, **options)
            options |= {"max_segments": self.max_segments, "mesh": self.mesh}
            return segment_attention(q_BSND, k_BSKD, v_BSKD, segments, **options)

        def run(layer: Layer, x_BSM: jax.Array, balance: Balance) -> tuple[jax.Array, Balance]:
            x_BSM = checkpoint_name(x_BSM, _INPUT)
            x_BSM, more = layer(x_BSM, rotate, attend, segment_ids, together=heads is None)
            if isinstance(self.mesh, NamedSharding) and heads is not None:
                # Otherwise the compiler may gather the weights that the axis cuts.
                whole = NamedSharding(self.mesh.mesh, PartitionSpec(rows, tokens))
                x_BSM = jax.lax.with_sharding_constraint(x_BSM, whole)
            return x_BSM, jax.tree.map(jnp.add, balance, more)

        rows, tokens, heads = self._axes

        segments = find_segments(segment_ids)  # once, for all layers
        lengths = segments.key_end - segments.key_begin
        turns = [(rope.frequencies(lengths), rope.scale) for rope in (config.rope, config.local_rope) if rope]
        level = "full" if self.remat is True else self.remat or "none"
        step = run if level == "none" else nnx.remat(run, policy=REMAT[level])
        x_BSM = self.model.embed_tokens(input_ids)
        if config.padding_id is not None:
            is_padding_BS = input_ids == config.padding_id % config.vocab_size
            x_BSM = jnp.where(is_padding_BS[..., None], jax.lax.stop_gradient(x_BSM), x_BSM)
        x_BSM = x_BSM * jnp.asarray(config.embedding_scale, x_BSM.dtype)
        balance = no_balance(config)
        if len(self.model.blocks):
            graphs, states = zip(*(nnx.split(block) for block in self.model.blocks), strict=True)

            def period(carry: tuple[jax.Array, Balance], slices: Any) -> tuple[tuple[jax.Array, Balance], None]:
                for graph, state in zip(graphs, slices, strict=True):
                    carry = step(nnx.merge(graph, state), *carry)
                return carry, None

            (x_BSM, balance), _ = jax.lax.scan(period, (x_BSM, balance), states)
        for layer in self.model.layers:
            x_BSM, balance = step(layer, x_BSM, balance)
        return self.model.norm(x_BSM), balance

    @_takes_explicit_axes(lambda rows: rows)
    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] of hidden states [..., M], through the output head or the tied embedding."""
        logits = self.model.embed_tokens.attend(hidden) if self.lm_head is None else self.lm_head(hidden)
        softcap = self.config.final_softcap
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    @_takes_explicit_axes(lambda rows: PartitionSpec())
    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Loss sum and weight sum of a batch as ``to_batch`` makes it, arrays [B, S], without keeping the logits.

        An output head that is no plain ``nnx.Linear`` (LoRA, a quantised one) is called, and its logits are kept. Where
        the config asks for its routers' auxiliary loss (``output_router_logits``), that of the batch's real tokens,
        times its coefficient, is part of the mean.
        """
        hidden, balance = self.hidden_and_balance(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        total, weight = self._cross_entropy(hidden, batch["targets"], batch["loss_weights"])
        mixture = self.config.mixture
        if mixture is not None and mixture.coefficient:
            total = total + mixture.coefficient * balance.loss() * weight
        return total, weight

    def _cross_entropy(self, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        tied = self.lm_head is None
        if self.lm_head is None:
            kernel = self.model.embed_tokens.embedding[...]
        elif type(self.lm_head) in PLAIN:
            kernel = self.lm_head.kernel[...]
        else:
            return packed_cross_entropy(self.logits(hidden), targets, weights=weights)
        rows, tokens, heads = self._axes
        mesh = self.mesh
        if isinstance(mesh, NamedSharding):  # devices with other heads of a row take other tokens of it here
            over = tuple(axis for axis in (tokens, heads) if axis is not None)
            if targets.shape[1] % math.prod(mesh.mesh.shape[axis] for axis in over):
                over = tuple(axis for axis in (tokens,) if axis is not None)
            mesh = NamedSharding(mesh.mesh, PartitionSpec(rows, over or None))
        softcap = self.config.final_softcap
        with jax.named_scope("cross_entropy"):
            return linear_cross_entropy(
                hidden, kernel, targets, weights=weights, softcap=softcap, transposed=tied, mesh=mesh
            )

    @property
    def _axes(self) -> tuple[Any, Any, Any]:
        """The mesh's axes over which rows, tokens and heads are spread, where ``mesh`` says so."""
        spec = self.mesh.spec if isinstance(self.mesh, NamedSharding) else ()
        rows, tokens, heads = (*spec, None, None, None)[:3]
        return rows, tokens, heads

    def __call__(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Logits [B, S, V] of packed rows; a padding position's logits mean nothing and influence nothing."""
        return self.logits(self.hidden(input_ids, segment_ids, position_ids))
