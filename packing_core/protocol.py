"""What the conformance suite asks of a packed-training stack: one class with at most nine methods, numpy in, numpy out.

    suite (float64 oracle, one document at a time)  --numpy arrays + a dtype name-->  Backend  --numpy arrays-->  suite

A stack takes part at four levels and implements what it has; every method left alone raises `UnsupportedError`:

    collator      `plan`, `collate`                         documents in, batch out
    operation     `attention`, `rope`, `scan`, `loss`       each with its vector-Jacobian product
    model         `forward`, `gradients`                    batch in, logits and gradients out
    trainer       `train`                                   documents in, updated weights out

Axis names: B rows, S tokens of a row, H query heads, K key/value heads, D query and key width, E value width, V words.

**Dtypes.** Arrays travel as float32, whatever the dtype *name* says (bfloat16 has no numpy dtype). What the suite sends
is already a value of the named dtype, so the adapter's cast loses nothing; it casts, computes in that dtype and returns
float32.

**Layout.** Operations take ``segment_ids [B, S]``: 1.. per row in contiguous runs, 0 for padding, anywhere in the row.

**Registration.** An entry point of the group ``crosspack.backends`` names a function ``backends()`` that returns
``{name: zero-argument factory}``; entry point ``torch`` with the name ``sdpa`` is addressed as ``torch:sdpa``. The
factory of what cannot run here raises `UnsupportedError` or `MissingExtraError` with the reason: NOT RUN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packing_core.errors import UnsupportedError

Array = npt.NDArray[Any]
Gradients = dict[str, Array]

DTYPES = ("float32", "bfloat16", "float16")

# Far above the usual 1e-8, under which AdamW turns gradients of the size of a rounding error into whole steps.
ADAMW_EPSILON = 1e-3

# level -> the methods by which a backend takes part in it
LEVELS: dict[str, tuple[str, ...]] = {
    "collator": ("plan", "collate"),
    "operation": ("attention", "rope", "scan", "loss"),
    "model": ("forward", "gradients"),
    "trainer": ("train",),
}

# method -> what a backend may declare or leave out: the name in `Capabilities.options`, and what it stands for
OPTIONS: dict[str, dict[str, str]] = {
    "plan": {
        "first_fit": 'strategy="first_fit"',
        "sequential": 'strategy="sequential"',
    },
    "collate": {"capacity": "rows of at most `capacity` tokens, instead of all documents in one row"},
    "attention": {
        "bidirectional": "causal=False",
        "window": "window=W",
        "softcap": "softcap=C",
        "sinks": "sinks=[H]",
        "alibi": "alibi_slopes=[H]",
        "gqa": "fewer key/value heads than query heads",
        "narrow_values": "values narrower than keys",
        "context_parallel": "context_ranks above 1",
        "arbitrary_ids": "segment ids that are any positive numbers; a promise",
        "nonfinite_padding": "NaN and Inf may stand at padding; a promise",
    },
    "rope": {"interleaved": "interleaved=True", "partial": "fewer channels turned than there are"},
    "scan": {},
    "loss": {"token_weights": "token_weights=[B, S]"},
    "forward": {
        "drawn_batches": "batches that the suite laid out (native None), where the backend has a collator of its own",
        "sliding_window": "a decoder with sliding_window",
        "dynamic_rope": "a decoder with dynamic_rope_factor",
    },
    "gradients": {"untrained_batches": "a batch without any target; a promise"},
    "train": {
        "adamw": 'optimizer="adamw"',
        "ranks": "ranks above 1",
        "mixed_precision": 'a dtype other than "float32"',
        "untrained_batches": "a step without any target; a promise",
    },
}
# Options about values, not arguments: a backend that leaves one out is not given such values, and refuses nothing.
PROMISES = frozenset({"arbitrary_ids", "nonfinite_padding", "untrained_batches"})
ALL_OPTIONS = frozenset(option for options in OPTIONS.values() for option in options)


@dataclass(frozen=True)
class Document:
    """One sequence as the user gave it.

    Attributes:
        input_ids: int64 ``[n]``.
        labels: int64 ``[n]``; ``labels[t]`` is the target that the logits at t-1 are trained on, -100 where token t is
            not trained on (a prompt). Equal to ``input_ids`` elsewhere.
    """

    input_ids: Array
    labels: Array


@dataclass(frozen=True)
class Batch:
    """What a collator hands to a model, under neutral names; all arrays int64 ``[B, S]``.

    Attributes:
        input_ids: tokens; anything at padding.
        segment_ids: 1.. per row, contiguous runs, 0 = padding.
        position_ids: restart at 0 at each segment; anything at padding.
        labels: Hugging Face's alignment (``labels[t]`` trains the logits at t-1): -100 at every segment's first token,
            at padding and where a document's own labels say so.
        native: what the backend's own model takes, as its own collator made it; None in a batch that the suite drew.
    """

    input_ids: Array
    segment_ids: Array
    position_ids: Array
    labels: Array
    native: Any = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of the suite's decoder, under the names of a Hugging Face Llama config.

    A pre-norm decoder: RMSNorm, rotary (rotate-half) causal attention, SwiGLU, no biases, tied embeddings.

    Attributes:
        sliding_window: keys visible to a query, its own included (Mistral's meaning); None for no limit.
        dynamic_rope_factor: None, or f of Hugging Face's ``{"rope_type": "dynamic", "factor": f}``: dynamic NTK, whose
            frequencies depend on the length of the document once it passes ``max_position_embeddings``.
    """

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32  # a width that every kernel has
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    sliding_window: int | None = None
    dynamic_rope_factor: float | None = None
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class Decoder:
    """The suite's decoder: its config and its float32 weights under Hugging Face Llama's safetensors names.

    ``model.embed_tokens.weight [V, C]``, ``model.norm.weight [C]`` and per layer ``model.layers.{i}.`` +
    ``input_layernorm``, ``self_attn.{q,k,v,o}_proj``, ``post_attention_layernorm``, ``mlp.{gate,up,down}_proj``, each
    ``.weight`` with matrices stored ``[out, in]``.
    """

    config: DecoderConfig
    weights: Mapping[str, Array]


@dataclass(frozen=True)
class Capabilities:
    """What a backend declares. A request outside of it must raise `UnsupportedError`; the suite asks, and checks.

    Attributes:
        dtypes: working dtypes, out of `DTYPES`.
        options: what it serves out of `ALL_OPTIONS`.
        head_dims: widths D that attention serves, as a range or any collection of ints.
        interpreted: runs in an interpreter (Triton's, Pallas's), so the suite draws a reduced selection and says so.
        atomic_backward: backward passes add with atomics, so their isolation is judged by the noise of running twice,
            not bitwise. The forward is bitwise for everybody.
        atomic_embedding: a model's gradients add with atomics although those of attention do not (on a GPU, the
            scatter-add of an embedding's gradient), so `gradients` and `train` are judged by the noise of reruns.
        own_model: `forward`, `gradients` and `train` use a model of their own and ignore the suite's `Decoder`; the
            oracle is then that same model in "float64", one document at a time, which these methods must serve.
        words: number of token ids that an own model knows, at least 64.
        longest: tokens of the longest document that an own model takes, at least 96.
    """

    dtypes: tuple[str, ...] = DTYPES
    options: frozenset[str] = ALL_OPTIONS
    head_dims: Collection[int] = field(default=range(1, 513))
    interpreted: bool = False
    atomic_backward: bool = False
    atomic_embedding: bool = False
    own_model: bool = False
    words: int = 64
    longest: int = 1024

    def refusal(
        self, *, dtype: str | None = None, options: Collection[str] = (), head_dim: int | None = None
    ) -> str | None:
        """Why a request lies outside of what is declared, or None when it is declared."""
        if dtype is not None and dtype not in self.dtypes and not (self.own_model and dtype == "float64"):
            return f"dtype {dtype} is not declared, only {', '.join(self.dtypes)}"
        undeclared = sorted(set(options) - self.options)
        if undeclared:
            return f"{', '.join(undeclared)} not declared"
        if head_dim is not None and head_dim not in self.head_dims:
            return f"head_dim {head_dim} is not declared, only {self.head_dims}"
        return None


class Backend:
    """One stack under test. Subclass it, override what the stack has, declare the rest away in `capabilities`.

    Attributes:
        capabilities: what is served; see `Capabilities`.
        description: versions and device, printed in the report.
    """

    capabilities: Capabilities = Capabilities()
    description: str = ""

    @classmethod
    def provides(cls, method: str) -> bool:
        """Whether the class overrides ``method``, which is how a backend takes part in a level."""
        return getattr(cls, method) is not getattr(Backend, method)

    # -- collator ------------------------------------------------------------------------------------------------

    def plan(self, lengths: Sequence[int], capacity: int, *, strategy: str) -> list[list[int]]:
        """Decide which document goes into which row, by counts alone (they may pass 2^31).

        Args:
            lengths: tokens of each document, each at most ``capacity``.
            strategy: "best_fit" (decreasing), or as declared "first_fit" (decreasing), "sequential" (next fit in the
                input's order).

        Returns:
            Document numbers per row; rows in the order they were opened.
        """
        raise self._lacks("plan")

    def collate(self, documents: Sequence[Document], capacity: int) -> Batch:
        """Pack documents into rows of at most ``capacity`` tokens, with every label the model is to be trained on.

        A collator that has no capacity (it puts all documents into one row) leaves the option "capacity" out; it is
        then given documents that fit into one row together, and refuses others.

        Raises:
            Exception: of any kind, when a document is longer than ``capacity``; it must not be cut or dropped.
        """
        raise self._lacks("collate")

    # -- operations ----------------------------------------------------------------------------------------------

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        segment_ids: Array,
        *,
        dtype: str,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        scale: float | None = None,
        context_ranks: int = 1,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """Attention of every segment over itself, and its vector-Jacobian product.

        Scores are scaled, softcapped, biased and masked in that order; a sink is one more logit of the denominator.

        Args:
            q: ``[B, S, H, D]``.
            k: ``[B, S, K, D]``; K below H takes the option "gqa" (query head h reads head ``h // (H // K)``).
            v: ``[B, S, K, E]``; E below D takes the option "narrow_values".
            segment_ids: ``[B, S]``. With the option "arbitrary_ids" also ids that are positive and constant over a
                segment and otherwise anything: global over the rows, unsorted, beyond S.
            causal: False takes the option "bidirectional".
            window: keys visible to a query, its own included, counted inside the segment.
            sinks: ``[H]`` logits.
            alibi_slopes: ``[H]``; the bias is ``-slope * (i - j)``.
            scale: None for ``D ** -0.5``.
            context_ranks: above 1 takes the option "context_parallel": so many ranks each hold ``S / context_ranks``
                neighbouring tokens of every row. The adapter splits the arrays and joins the answers.
            dout: ``[B, S, H, E]``, zero at padding; None for the forward alone.

        Returns:
            ``[B, S, H, E]``, finite at padding, and with ``dout`` the gradients ``{"q", "k", "v"}`` (and "sinks" when
            given), exactly zero at padding; without it an empty dict.
        """
        raise self._lacks("attention")

    def rope(
        self,
        x: Array,
        position_ids: Array,
        inv_freq: Array,
        *,
        dtype: str,
        interleaved: bool = False,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """Rotate the first ``R = 2 * len(inv_freq)`` channels by ``position * inv_freq``; the vector-Jacobian product.

        Args:
            x: ``[B, S, H, D]``; R below D takes the option "partial".
            position_ids: int64 ``[B, S]``.
            inv_freq: float32 ``[R/2]``. Angles, their sines and cosines are float32 or wider, whatever the dtype.
            interleaved: pairs are (2i, 2i+1), not (i, i + R/2).
            dout: ``[B, S, H, D]`` or None.

        Returns:
            ``[B, S, H, D]`` and ``{"x": ...}`` (empty without ``dout``).
        """
        raise self._lacks("rope")

    def scan(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        segment_ids: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """Selective scan (Mamba, arXiv 2312.00752, section 3.2) whose state starts from zero at every segment.

        ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t``, ``y_t = C_t . h_t``: no skip, no gate.

        Args:
            x: ``[B, S, M]`` channels.
            dt: ``[B, S, M]`` positive steps.
            A: ``[M, N]`` negative decay rates, N states a channel.
            B: ``[B, S, N]``.
            C: ``[B, S, N]``.
            segment_ids: ``[B, S]``.
            dout: ``[B, S, M]``, zero at padding, or None.

        Returns:
            ``[B, S, M]`` and the gradients ``{"x", "dt", "A", "B", "C"}`` (empty without ``dout``), zero at padding.
        """
        raise self._lacks("scan")

    def loss(
        self,
        logits: Array,
        labels: Array,
        segment_ids: Array,
        *,
        dtype: str,
        token_weights: Array | None = None,
    ) -> tuple[float, float, Array]:
        """Next-token cross-entropy as a sum and a weight, so that it can be divided once.

        Args:
            logits: ``[B, S, V]``.
            labels: int64 ``[B, S]`` **as given**: ``labels[t]`` trains the logits at t-1, -100 is not trained on.
                Labels at a segment's first token and at padding are present here and must not count.
            segment_ids: ``[B, S]``.
            token_weights: ``[B, S]`` weight of each label, aligned with ``labels``; None for 1.

        Returns:
            The loss sum, the weight sum, and the gradient of the loss sum ``[B, S, V]``, zero where nothing is trained.
        """
        raise self._lacks("loss")

    # -- model ---------------------------------------------------------------------------------------------------

    def forward(self, decoder: Decoder, batch: Batch, *, dtype: str) -> Array:
        """Logits ``[B, S, V]`` of a batch.

        A backend that has a collator is given its own batches, and with the option "drawn_batches" also ones in which
        the suite laid out the rows (``native`` None: padding anywhere, any B); one that has no collator only those.
        """
        raise self._lacks("forward")

    def gradients(self, decoder: Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        """The mean loss over the batch's trained labels and its gradient by weight name; 0 where nothing is trained."""
        raise self._lacks("gradients")

    # -- trainer -------------------------------------------------------------------------------------------------

    def train(
        self,
        decoder: Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        capacity: int,
        learning_rate: float,
        dtype: str,
        optimizer: str = "sgd",
        ranks: int = 1,
    ) -> tuple[list[float], dict[str, Array]]:
        """Train from the decoder's weights, which stay as they are, packing with the stack's own collator.

        Args:
            steps: ``steps[i][j]`` are the documents of microbatch j of optimizer step i.
            capacity: tokens a row can hold.
            dtype: "float32"; with the option "mixed_precision" another declared one, in which the forward and the
                backward then compute, while weights, summed gradients and the optimizer's state stay float32.
            optimizer: "sgd" (plain, no momentum) or as declared "adamw" (betas 0.9 and 0.999, `ADAMW_EPSILON`, no
                decay).
            ranks: over how many data-parallel ranks microbatch j goes to rank ``j % ranks`` (option "ranks" above 1).

        Returns:
            Per step the mean loss over its trained labels (0 without any), before the update; and the weights after
            the last step.
        """
        raise self._lacks("train")

    def _lacks(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} has no {method}: override it to take part")


BackendFactory = Callable[[], Backend]


def require_declared(backend: Backend, **request: Any) -> None:
    """Refuse an undeclared request in one line, for adapters whose stack does not refuse by itself.

    Args:
        backend: whose `Capabilities` decide.
        request: the keyword arguments of `Capabilities.refusal`.

    Raises:
        UnsupportedError: the request is not declared.
    """
    reason = backend.capabilities.refusal(**request)
    if reason is not None:
        raise UnsupportedError(f"{type(backend).__name__}: {reason}")


def attention_options(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    context_ranks: int = 1,
    **_: Any,
) -> set[str]:
    """Name the options of `OPTIONS["attention"]` that a call of `Backend.attention` takes."""
    taken = {
        "bidirectional": not causal,
        "window": window is not None,
        "softcap": softcap is not None,
        "sinks": sinks is not None,
        "alibi": alibi_slopes is not None,
        "gqa": k.shape[-2] < q.shape[-2],
        "narrow_values": v.shape[-1] < q.shape[-1],
        "context_parallel": context_ranks > 1,
    }
    return {name for name, is_taken in taken.items() if is_taken}


def position_ids(segment_ids: Array) -> Array:
    """Positions that restart at 0 at each run of equal segment ids, padding runs included: int64 ``[B, S]``."""
    ids = np.asarray(segment_ids)
    column = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int64), ids.shape)
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)


def cu_seqlens(segment_ids: Array) -> Array:
    """Boundaries of all runs of the flattened rows, int32 ``[N+1]``; a run of padding is a segment of any length."""
    starts = np.flatnonzero(position_ids(segment_ids).ravel() == 0)
    return np.append(starts, np.asarray(segment_ids).size).astype(np.int32)


def segments(segment_ids: Array) -> list[tuple[int, int, int]]:
    """Every real segment as ``(row, start, stop)``, in row order."""
    width = np.asarray(segment_ids).shape[1]
    flat = np.asarray(segment_ids).ravel()
    bounds = cu_seqlens(segment_ids).tolist()
    return [(lo // width, lo % width, lo % width + hi - lo) for lo, hi in pairwise(bounds) if flat[lo] != 0]
