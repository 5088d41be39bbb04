"""Layouts, tensors and documents that the requirements are tried on: small tables in, seeded numpy arrays out.

A layout is written as rows of lengths, in which a negative number is a run of padding: ``((3, -2), (1, 4))`` is a row
of one three-token segment and two tokens of padding, and a row of two segments. All rows of a layout are equally long.
Layouts share a few widths on purpose: a compiled backend compiles once per shape, and this suite has to stay quick.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Self, cast

import numpy as np

from conformance.pairwise import Needs
from packing_core.protocol import (
    Array,
    Batch,
    Decoder,
    DecoderConfig,
    Document,
    attention_options,
    position_ids,
    segments,
)
from packing_core.reference.arithmetic import WorkingDtype, operands, plain

Rows = tuple[tuple[int, ...], ...]

FULL: Rows = ((7, 16, 1, 33, 24, 15),)  # one row without padding
# Spans of FULL: over boundaries, the whole of a segment, one token, more than a tile of 16.
FULL_SPANS: Rows = ((-2, 8, 3, -8, 3, -6, 20, 7, 24, -15),)
PADDED: Rows = ((-5, 9, 17, -3, 1, 30, 14, -17),)  # padding before, between and after
FOUR_ROWS: Rows = ((5, 40, 12, 39), (16, 16, 2, 31, 31), (50, 46), (1, 30, 3, 62))  # other offsets in each row
MANY_ROWS: Rows = ((5, 11), (16,), (1, 9, 6)) * 6  # more rows than a table of eight or sixteen holds
# The documents of FULL in other rows, another order and other places.
REPACKED: Rows = ((33, -8, 7), (-1, 24, 1, -22), (16, -32), (-20, 15, -13))
REPACKED_AS = (3, 0, 4, 2, 1, 5)  # the document of FULL that each segment of REPACKED holds
LONG_TAIL: Rows = ((5, 9, 12, -70),)  # a tail longer than every segment
EMPTY_ROWS: Rows = ((-96,), (20, 30, 46), (-96,))
PADDING_ALONE: Rows = ((-96,), (-96,))
ALONE: Rows = ((96,),)
MIXED: Rows = ((-3, 70, -2, 1, 16, -4), (2,) * 40 + (16,), (-96,))  # all of it, and more than 64 tokens and 16 segments
ALIKE: Rows = ((32, 32, 32), (32, 32, 32))
PAST_64: Rows = ((1,) * 70 + (13, 13),)  # two long segments behind 70 one-token ones
# Segments that start at 16, 64, 128, 256 and 512, and in the second row one token later.
TILES: Rows = ((16, 48, 64, 128, 256, 64), (17, 48, 64, 128, 256, 63))
# Lengths of documents for rows of 768 tokens: a few long ones, and 295 short ones.
LONG_DOCUMENTS = (640, 1, 64, 63)  # the second starts where a tile does, in this order or by length
MANY_DOCUMENTS = (2, 1, 4, 1, 5) * 59
LONG_ROW = 768

# An isolated segment is changed by this. A leak of one part in a thousand still shows, and in float16 a product over
# a head stays finite.
LARGE = {"float32": 1e3, "bfloat16": 1e3, "float16": 16.0}


def segment_ids(rows: Rows) -> Array:
    """int64 ``[B, S]``: 1.. per row, 0 at padding."""
    filled = []
    for row in rows:
        numbers = iter(range(1, len(row) + 1))
        filled.append(np.concatenate([np.full(abs(n), next(numbers) if n > 0 else 0, np.int64) for n in row]))
    stacked: Array = np.stack(filled)
    return stacked


def span_numbers(rows: Rows, spans: Rows) -> Array:
    """int64 ``[B, S]``: the spans of each row have numbers in no order; -1 between them and at padding.

    ``spans`` are rows of lengths like ``rows``, in which a negative number is a run of tokens in no span.
    """
    numbers = segment_ids(spans)
    return np.where((segment_ids(rows) > 0) & (numbers > 0), numbers * 48_611 % 65_521, -1)


def round_to(dtype: str, x: Array) -> Array:
    """float32 array of the nearest values of ``dtype``."""
    (rounded,) = operands(cast(WorkingDtype, dtype), x)
    values: Array = plain(rounded).astype(np.float32)
    return values


def generator(*key: object) -> np.random.Generator:
    """A generator that depends on nothing but ``key``: the same numbers in every process and every order of tests."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def index_operands(ids: Array, draw: np.random.Generator, block: int = 1) -> dict[str, Array]:
    """``index_q``, ``index_k`` and ``index_weights`` by which no two keys of a row have one score for a query.

    Key j has a rank of its own and query i a turning point t: the score is ``rank + 2 relu(t + 0.25 - rank)``, so that
    a query prefers low ranks to some high ones. These numbers are exact in float32 and every order of sums. Ranks of
    keys in blocks are so many that no two blocks have one mean.
    """
    rank = draw.permuted(np.tile(np.arange(ids.shape[1]), (len(ids), 1)), axis=1)
    turn, one = draw.integers(0, ids.shape[1], ids.shape) + 0.25, np.ones(ids.shape)
    if block > 1:
        rank, turn = draw.integers(0, 2**16, ids.shape), draw.integers(0, 2**16, ids.shape) + 0.25 / block
    q = np.stack([np.stack([one, 0 * one], -1), np.stack([-one, turn], -1)], 2)
    arrays = {"index_q": q, "index_k": np.stack([rank, one], -1), "index_weights": np.stack([one, 2 * one], -1)}
    return {name: x.astype(np.float32) for name, x in arrays.items()}


class OperationCase:
    """One call of an operation on the segments of ``rows``: shapes, options, and the seed of its numbers.

    Attributes:
        method: the name of the operation.
        isolated: the arrays of a segment that are changed to see whether another one moves.
        padded: the arrays that hold any numbers at padding.
    """

    method: ClassVar[str]
    isolated: ClassVar[tuple[str, ...]] = ()
    padded: ClassVar[tuple[str, ...]] = ()
    rows: Rows

    @property
    def head_dim(self) -> int | None:
        """The width of heads that a backend must declare; None where it declares none."""
        return None

    def arguments(self, dtype: str) -> dict[str, Array]:
        """The arrays by the names of the method, ``dout`` (zero at padding) among them."""
        drawn = self.drawn(generator(self), segment_ids(self.rows))
        return {name: round_to(dtype, x) for name, x in drawn.items()}

    def drawn(self, draw: np.random.Generator, ids: Array) -> dict[str, Array]:
        """The arrays before they are rounded to a dtype."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not drawn."""
        return {}

    def taken(self, arrays: Mapping[str, Any]) -> set[str]:
        """The declarable options that a call with these arguments takes."""
        return set()

    def sound(self, arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
        """Arguments in which any numbers may stand, as a model would pass them."""
        return dict(arrays)

    def fitted(self, head_dims: Collection[int]) -> Self:
        """The case, at a width that a backend declares."""
        return self


@dataclass(frozen=True)
class AttentionCase(OperationCase):
    """One call of `Backend.attention`."""

    method = "attention"
    isolated = ("q", "k", "v", "dout", "index_q", "index_k")
    padded = ("q", "k", "v")
    rows: Rows = FULL
    heads: int = 2
    kv_heads: int = 2
    width: int = 64
    value_width: int | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: float = 0.0  # their standard deviation
    alibi: bool = False
    scale: float | None = None
    spans: Rows | None = field(default=None, repr=False)  # the numbers that are drawn do not depend on it
    top_k: int | None = field(default=None, repr=False)
    index_block: int = field(default=1, repr=False)
    context_ranks: int = 1
    spread: float = 1.0  # standard deviation of q; larger makes sharper softmaxes
    value_mean: float = 0.0
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.width

    def arguments(self, dtype: str) -> dict[str, Array]:
        draw = generator(self)
        ids = segment_ids(self.rows)
        value_width = self.value_width or self.width

        def normal(*shape: int) -> Array:
            return round_to(dtype, draw.standard_normal(ids.shape + shape))

        arrays = {
            "q": round_to(dtype, self.spread * normal(self.heads, self.width)),
            "k": normal(self.kv_heads, self.width),
            "v": round_to(dtype, self.value_mean + normal(self.kv_heads, value_width)),
            "dout": normal(self.heads, value_width) * (ids > 0)[..., None, None],
        }
        if self.sinks:
            arrays["sinks"] = round_to(dtype, self.sinks * draw.standard_normal(self.heads))
        if self.alibi:
            arrays["alibi_slopes"] = round_to(dtype, 2.0 ** -np.arange(1, self.heads + 1))
        if self.spans is not None:
            arrays["spans"] = span_numbers(self.rows, self.spans)
        return arrays if self.top_k is None else arrays | index_operands(ids, draw, self.index_block)

    def index_arguments(self, dtype: str) -> dict[str, Array]:
        """The operands of `Backend.index_loss`: no two scores are equal, and all have a probability."""
        arrays = self.arguments(dtype)
        weights = arrays["index_weights"] / 16
        return {"index_q": arrays["index_q"], "index_k": arrays["index_k"], "index_weights": weights} | {
            name: arrays[name] for name in ("q", "k")
        }

    def options(self) -> dict[str, Any]:
        chosen = {name: getattr(self, name) for name in ("causal", "window", "softcap", "scale")}
        chosen |= {} if self.top_k is None else {"top_k": self.top_k}
        chosen |= {} if self.index_block == 1 else {"index_block": self.index_block}
        return chosen | ({"context_ranks": self.context_ranks} if self.context_ranks > 1 else {})

    def taken(self, arrays: Mapping[str, Any]) -> set[str]:
        return attention_options(**arrays)


# The fields of a case that every pair of values of should work together; see `pairwise.declared_pairs`.
ATTENTION_PAIRS: dict[str, list[Any]] = {
    "rows": [FOUR_ROWS, MIXED],
    "widths": [
        {},
        Needs("head_dim 40", {"width": 40}),
        Needs("head_dim 72", {"width": 72}),
        Needs("narrow_values", {"value_width": 32}),
    ],
    "heads": [2, Needs("gqa", 6)],
    "window": [None, Needs("window", 9)],
    "softcap": [None, Needs("softcap", 4.0)],
    "sinks": [0.0, Needs("sinks", 1.0)],
    "alibi": [False, Needs("alibi", True)],
    "scale": [None, 0.3],
    "context_ranks": [1, Needs("context_parallel", 2)],
    "keys": [{}, Needs("bidirectional", {"causal": False}), Needs("both_ways", {"spans": FULL_SPANS})],
}
SELECTED_PAIRS = {name: ATTENTION_PAIRS[name] for name in ("rows", "widths", "heads", "softcap", "sinks", "scale")} | {
    "keys": [Needs("selected_keys", {"top_k": 9}), Needs("selected_blocks", {"top_k": 2, "index_block": 4})],
}


@dataclass(frozen=True)
class ScanCase(OperationCase):
    """One call of `Backend.scan`."""

    method = "scan"
    isolated = ("x", "B", "C", "dout")
    padded = ("x", "B", "C")
    rows: Rows = FULL
    channels: int = 16
    states: int = 8
    seed: int = 0

    def drawn(self, draw: np.random.Generator, ids: Array) -> dict[str, Array]:
        return {
            "x": draw.standard_normal((*ids.shape, self.channels)),
            "dt": draw.uniform(0.01, 0.5, (*ids.shape, self.channels)),
            "A": -(2.0 ** draw.uniform(-4, 4, (self.channels, self.states))),
            "B": draw.standard_normal((*ids.shape, self.states)),
            "C": draw.standard_normal((*ids.shape, self.states)),
            "dout": draw.standard_normal((*ids.shape, self.channels)) * (ids > 0)[..., None],
        }


@dataclass(frozen=True)
class RopeCase(OperationCase):
    """One call of `Backend.rope`; ``first`` is added to every position."""

    method = "rope"
    rows: Rows = FULL
    heads: int = 2
    width: int = 64
    turned: int = 64
    interleaved: bool = False
    first: int = 0
    seed: int = 0

    def arguments(self, dtype: str) -> dict[str, Array]:
        draw = generator(self)
        positions = position_ids(segment_ids(self.rows)) + self.first
        shape = (*positions.shape, self.heads, self.width)
        return {
            "x": round_to(dtype, draw.standard_normal(shape)),
            "position_ids": positions,
            "inv_freq": _frequencies(self.turned),
            "dout": round_to(dtype, draw.standard_normal(shape)),
        }

    def options(self) -> dict[str, Any]:
        return {"interleaved": self.interleaved}

    def taken(self, arrays: Mapping[str, Any]) -> set[str]:
        taken = {"interleaved": self.interleaved, "partial": self.turned < self.width}
        return {name for name, is_taken in taken.items() if is_taken}


def _frequencies(width: int) -> Array:
    """float32 ``[R / 2]``: a power series, of which every third is slowed down, as rope scaling does with some."""
    frequencies = 10_000.0 ** (-np.arange(0, width, 2) / width)
    frequencies[1::3] /= 1.7
    return frequencies.astype(np.float32)


ROPE_PAIRS: dict[str, list[Any]] = {
    "rows": [FOUR_ROWS, MIXED],
    "turned": [64, Needs("partial", 32)],
    "interleaved": [False, Needs("interleaved", True)],
    "first": [10_000, 1_000_000],
}


@dataclass(frozen=True)
class LossCase:
    """One call of `Backend.loss`: every token has a label, but for a share that is masked as prompts are."""

    rows: Rows = FULL
    words: int = 48
    spread: float = 2.0  # standard deviation of the logits
    masked: float = 0.0
    weighted: bool = False
    untrained_rows: tuple[int, ...] = ()
    seed: int = 0
    signed: bool = field(default=False, repr=False)  # weights of both signs, and zeros

    def arguments(self, dtype: str) -> dict[str, Array]:
        """``logits``, ``labels`` and, when the case has them, ``token_weights``."""
        draw = generator(self)
        ids = segment_ids(self.rows)
        labels = draw.integers(0, self.words, ids.shape)
        labels[:, 1] = self.words - 1
        labels[draw.random(ids.shape) < self.masked] = -100
        labels[list(self.untrained_rows)] = -100
        arrays = {
            "logits": round_to(dtype, self.spread * draw.standard_normal((*ids.shape, self.words))),
            "labels": labels,
        }
        if self.weighted:
            drawn = draw.integers(-64, 65, ids.shape) // 8 * 8 if self.signed else draw.integers(16, 129, ids.shape)
            arrays["token_weights"] = (drawn / 64).astype(np.float32)  # sums are exact
        return arrays


def documents(
    *lengths: int, words: int = 64, prompt: float = 0.0, turn: int | None = None, seed: int = 0
) -> list[Document]:
    """Documents of the given lengths; a share ``prompt`` of each, from its start, is not trained on.

    With ``turn`` every second run of so many tokens is not trained on either, as in a conversation.
    """
    drawn = []
    for number, length in enumerate(lengths):
        ids = generator("document", seed, number, length).integers(0, words, length)
        labels = ids.copy()
        labels[: int(prompt * length)] = -100
        if turn is not None:
            labels[np.arange(length) // turn % 2 == 0] = -100
        drawn.append(Document(ids, labels))
    return drawn


# Of rows of 96: a row of long documents and one of many short ones, both with padding.
SEVERAL_ROWS = documents(7, 70, 1, 16, *(2,) * 30, 9)


def grown(stems: Sequence[Document], lengths: Sequence[int], seed: int, *, trained: bool = False) -> list[Document]:
    """Each stem continued by an end of each length; only the ends are trained, or with ``trained`` all of it."""
    found = []
    for number, stem in enumerate(stems):
        for end in documents(*lengths, seed=seed + number):
            ids = np.concatenate([stem.input_ids, end.input_ids])
            before = stem.labels if trained else np.full(len(stem.input_ids), -100)
            found.append(Document(ids, np.concatenate([before, end.labels])))
    return found


def untrained(document: Document) -> Document:
    """The same document, none of whose tokens is a target."""
    return replace(document, labels=np.full_like(document.labels, -100))


def altered(document: Document) -> Document:
    """A document of the same length and mask that differs at every token."""
    ids = (document.input_ids + 1 + generator("altered", len(document.input_ids)).integers(0, 63)) % 64
    return Document(ids, np.where(document.labels == -100, -100, ids))


def lay_out(rows: Rows, placed: Sequence[Document], *, pad_token: int = 0) -> Batch:
    """The batch of ``rows`` whose segments hold the documents in order, under the rules of `Batch`."""
    ids = segment_ids(rows)
    input_ids = np.full(ids.shape, pad_token, np.int64)
    labels = np.full(ids.shape, -100, np.int64)
    for (row, start, stop), document in zip(segments(ids), placed, strict=True):
        input_ids[row, start:stop] = document.input_ids
        labels[row, start + 1 : stop] = document.labels[1:]
    return Batch(input_ids, ids, position_ids(ids), labels)


ONE_LAYER = DecoderConfig(num_hidden_layers=1)  # where what is tried does not depend on layers: half to compile


@dataclass(frozen=True)
class DecoderCase:
    """The suite's decoder with weights drawn from a seed; ``config`` changes fields of `DecoderConfig`."""

    config: DecoderConfig = field(default_factory=DecoderConfig)
    seed: int = 0

    def decoder(self) -> Decoder:
        """Matrices of standard deviation ``fan_in ** -0.5`` and norms near 1, so that no layer is a trivial one."""
        return Decoder(self.config, {name: weight.copy() for name, weight in _weights(self).items()})


@cache
def _weights(case: DecoderCase) -> dict[str, Array]:
    draw = generator("decoder", case.seed)
    c = case.config
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

    def matrix(out: int, into: int) -> Array:
        return np.asarray(draw.standard_normal((out, into)) * into**-0.5, np.float32)

    def norm() -> Array:
        return draw.uniform(0.5, 1.5, c.hidden_size).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        layer = {
            "input_layernorm": norm(),
            "self_attn.q_proj": matrix(heads, c.hidden_size),
            "self_attn.k_proj": matrix(kv, c.hidden_size),
            "self_attn.v_proj": matrix(kv, c.hidden_size),
            "self_attn.o_proj": matrix(c.hidden_size, heads),
            "post_attention_layernorm": norm(),
            "mlp.gate_proj": matrix(c.intermediate_size, c.hidden_size),
            "mlp.up_proj": matrix(c.intermediate_size, c.hidden_size),
            "mlp.down_proj": matrix(c.hidden_size, c.intermediate_size),
        }
        weights |= {f"model.layers.{i}.{name}.weight": array for name, array in layer.items()}
    weights["model.norm.weight"] = norm()
    return weights
