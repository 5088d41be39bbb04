"""Numbers per document: cases, per-document truth beside the packed answer, for reductions, log-probabilities, pairs.

Like :mod:`conformance.whole_models`, this holds a backend of the suite's `Decoder` against the numpy decoder in
float64, and one with a model of its own against that model in "float64", one document per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from conformance import decoder as numpy_decoder
from conformance import whole_models
from conformance.draws import (
    FOUR_ROWS,
    LARGE,
    DecoderCase,
    Rows,
    documents,
    generator,
    round_to,
    segment_ids,
)
from conformance.judge import Judge, as_result
from conformance.oracle import Expected, Result
from packing_core import reference
from packing_core.protocol import Array, Document, Gradients, Place, segments
from packing_core.reference import WorkingDtype
from packing_core.reference.arithmetic import operands, plain

HOW = ("sum", "mean", "first", "last")
BETA = 0.1


@dataclass(frozen=True)
class ReduceCase:
    """One call of `Backend.reduce`.

    Attributes:
        pieces: the segments of each document in reading order; None for one each, the documents in mixed order.
        left_out: a share of the tokens does not count.
        silent: documents of which no token counts.
    """

    rows: Rows = FOUR_ROWS
    how: str = "sum"
    pieces: tuple[tuple[int, ...], ...] | None = None
    left_out: float = 0.0
    silent: tuple[int, ...] = ()
    seed: int = 0

    def documents(self) -> list[list[Place]]:
        """The pieces of each document, as `Backend.reduce` takes them."""
        every = segments(segment_ids(self.rows))
        pieces = self.pieces or tuple((int(s),) for s in generator("order", self.rows).permutation(len(every)))
        return [[every[segment] for segment in piece] for piece in pieces]

    def arguments(self, dtype: str) -> dict[str, Any]:
        """``values`` (large at padding), ``dout`` and, when some tokens do not count, ``where``."""
        draw = generator(self)
        shape, documents = segment_ids(self.rows).shape, self.documents()
        owner = owners(documents, shape)
        values = round_to(dtype, draw.standard_normal(shape))
        found = {
            "values": np.where(owner < 0, np.float32(LARGE[dtype]), values),
            "dout": round_to(dtype, draw.standard_normal(len(documents))),
        }
        if self.left_out or self.silent:
            found["where"] = (draw.random(shape) >= self.left_out) & ~np.isin(owner, self.silent)
        return found


def owners(documents: Sequence[Sequence[Place]], shape: tuple[int, ...]) -> Array:
    """int ``[B, S]``: the document of each token, -1 at padding."""
    found = np.full(shape, -1)
    for number, pieces in enumerate(documents):
        for row, start, stop in pieces:
            found[row, start:stop] = number
    return found


@cache
def expected(case: ReduceCase, dtype: WorkingDtype) -> Expected:
    """``[N]`` and the gradient of the values, one document at a time."""
    arrays = case.arguments(dtype)

    def compute(arithmetic: WorkingDtype) -> Result:
        values, dout = operands(arithmetic, arrays["values"], arrays["dout"])
        out, gradient = np.zeros(len(dout)), np.zeros(values.shape)
        for number, pieces in enumerate(case.documents()):
            places = [(row, t) for row, start, stop in pieces for t in range(start, stop)]
            if "where" in arrays:
                places = [place for place in places if arrays["where"][place]]
            if case.how in ("first", "last"):
                places = places[:1] if case.how == "first" else places[-1:]
            if not places:
                continue
            at = tuple(np.array(places).T)
            share = dout[number] / len(places) if case.how == "mean" else dout[number]
            out[number] = plain(values[at].mean() if case.how == "mean" else values[at].sum())
            gradient[at] = plain(share)
        return out, {"values": gradient}

    return Expected(compute("float64"), compute(dtype))


def ask(judge: Judge, case: ReduceCase, dtype: str, changed: Mapping[str, Array | None] | None = None) -> Result:
    """``[N]`` and the gradient of the values, some of the arrays exchanged."""
    arrays = {**case.arguments(dtype), **(changed or {})}
    values = arrays.pop("values")
    return as_result(judge.ask("reduce", values, case.documents(), dtype=dtype, how=case.how, **arrays))


def check_reduce(judge: Judge, case: ReduceCase, *, only: str | None = "out", dtype: str | None = None) -> None:
    """The results of a forward alone, or the gradient, or with None both are those of each document's own tokens."""
    dtype = dtype or judge.dtype
    answer = ask(judge, case, dtype, {"dout": None} if only == "out" else None)
    judge.within(answer, expected(case, dtype), segment_ids(case.rows), dtype, only=only)


def check_reduce_isolated(judge: Judge, case: ReduceCase) -> None:
    """A change of one document's values moves its own result and no other's."""
    dtype = judge.dtype
    values = case.arguments(dtype)["values"]
    before, _ = ask(judge, case, dtype)
    owner = owners(case.documents(), values.shape)
    for number in range(len(before)):
        after, _ = ask(
            judge, case, dtype, {"values": np.where(owner == number, LARGE[dtype], values).astype(np.float32)}
        )
        others = np.arange(len(before)) != number
        judge.unmoved("the results of others", before[others], after[others], because=f"document {number} changed")
        judge.holds(before[number] != after[number], f"document {number} changed and its result did not move")


# -- log-probabilities -------------------------------------------------------------------------------------------------


def check_logprobs(
    judge: Judge,
    drawn: Sequence[Document],
    *,
    temperature: float = 1.0,
    weights: bool | None = False,
    case: DecoderCase | None = None,
    capacity: int = 96,
    dtype: str | None = None,
) -> None:
    """Log-probabilities of a forward alone, or with ``weights`` the gradients, or with None both, are those of the
    documents run alone."""
    case, dtype = case or DecoderCase(), dtype or judge.dtype
    batch = whole_models.collated(judge, drawn, capacity)
    where = whole_models.places(batch, drawn)
    dout = generator("cotangent", batch.labels.shape).standard_normal(batch.labels.shape).astype(np.float32)
    cotangents = [dout[row, start:stop] for row, start, stop in where]
    options = whole_models.options_of(case) | ({"temperature"} if temperature != 1 else set())
    keywords: dict[str, Any] = {"dtype": dtype, "temperature": temperature, "options": options}
    keywords["dout"] = None if weights is False else dout
    answer, found = as_result(judge.ask("logprobs", case.decoder(), batch, **keywords))
    judge.equal("the shape of log-probabilities", answer.shape, batch.labels.shape)
    judge.equal(
        "log-probabilities where nothing is trained", answer[batch.labels == -100], 0 * answer[batch.labels == -100]
    )
    truth = []
    for arithmetic in ("float64", dtype):
        alone = [
            _logprobs_alone(judge, case, document, cotangent, temperature, arithmetic)
            for document, cotangent in zip(drawn, cotangents, strict=True)
        ]
        names = alone[0][1]
        total = {name: np.sum([gradients[name] for _, gradients in alone], axis=0) for name in names}
        truth.append((np.concatenate([logprobs for logprobs, _ in alone])[None], total))
    together = np.concatenate([answer[row, start:stop] for row, start, stop in where])[None]
    if weights is not False:
        none = np.zeros(1)
        pair = Expected((none, truth[0][1]), (none, truth[1][1]))
        judge.within((none, found), pair, None, dtype)
    if weights is not True:
        ids = np.repeat(np.arange(len(drawn)), [len(document.input_ids) for document in drawn])[None] + 1
        judge.within((together, {}), Expected((truth[0][0], {}), (truth[1][0], {})), ids, dtype)


def check_logprobs_isolated(judge: Judge, drawn: Sequence[Document]) -> None:
    """Exchanging one document moves its own log-probabilities and no other document's."""
    decoder = DecoderCase().decoder()
    call = whole_models.packed_call(judge, drawn, 96, lambda b: judge.ask("logprobs", decoder, b, dtype=judge.dtype)[0])
    whole_models.check_moves_alone(judge, drawn, call, "log-probabilities")


def check_embed(
    judge: Judge,
    drawn: Sequence[Document],
    how: str,
    *,
    only: str | None = None,
    case: DecoderCase | None = None,
    dtype: str | None = None,
) -> None:
    """Pooled hidden states and the gradients of all weights, or the states of a forward alone ("out"), are those of the
    documents run alone."""
    case, dtype = case or DecoderCase(), dtype or judge.dtype
    width = case.config.hidden_size
    dout = round_to(dtype, generator("pooled", how, len(drawn)).standard_normal((len(drawn), width)))
    keywords: dict[str, Any] = {"how": how, "dtype": dtype, "options": whole_models.options_of(case)}
    keywords["dout"] = None if only == "out" else dout
    answer, weights = as_result(judge.ask("embed", case.decoder(), drawn, **keywords))
    truth = []
    for arithmetic in ("float64", dtype):
        alone = [_embedded_alone(judge, case, x, how, y, arithmetic) for x, y in zip(drawn, dout, strict=True)]
        total = {name: np.sum([gradients[name] for _, gradients in alone], axis=0) for name in alone[0][1]}
        truth.append((np.stack([vector for vector, _ in alone])[None], total))
    judge.within((answer[None], weights), Expected(*truth), np.arange(1, len(drawn) + 1)[None], dtype, only=only)


def check_embed_isolated(judge: Judge, drawn: Sequence[Document], how: str) -> None:
    """Exchanging one document moves its own vector and no other document's."""
    ask = partial(judge.ask, "embed", DecoderCase().decoder(), how=how, dtype=judge.dtype)
    whole_models.check_moves_alone(judge, drawn, lambda documents: ask(documents)[0], "vector")


def _embedded_alone(
    judge: Judge, case: DecoderCase, document: Document, how: str, dout: Array, dtype: str
) -> tuple[Array, Gradients]:
    """The vector ``[C]`` of one document alone, and the weights' gradients."""
    if judge.backend.capabilities.own_model:
        answer = judge.backend.embed(case.decoder(), [document], how=how, dtype=dtype, dout=dout[None])
        return np.asarray(answer[0], np.float64)[0], answer[1]
    vector, backward = numpy_decoder.embedding_alone(case.decoder(), document.input_ids, how, dtype=dtype)  # type: ignore[arg-type]
    return vector, backward(dout)


def _logprobs_alone(
    judge: Judge, case: DecoderCase, document: Document, dout: Array, temperature: float, dtype: str
) -> tuple[Array, Gradients]:
    """Log-probabilities ``[n]`` of one document alone, at the labels' own tokens, and the weights' gradients."""
    if judge.backend.capabilities.own_model:
        batch = whole_models.collated(judge, [document], len(document.input_ids))
        ((row, start, stop),) = whole_models.places(batch, [document])
        placed = np.zeros(batch.labels.shape, np.float32)
        placed[row, start:stop] = dout
        found = judge.backend.logprobs(case.decoder(), batch, dtype=dtype, temperature=temperature, dout=placed)
        return np.asarray(found[0], np.float64)[row, start:stop], found[1]
    logits, backward = numpy_decoder.alone(case.decoder(), document.input_ids, dtype=dtype)  # type: ignore[arg-type]
    targets = np.append(document.labels[1:], -100)
    options: dict[str, Any] = {"temperature": temperature, "dtype": dtype}
    logprobs, _ = reference.token_logprobs(logits, targets, **options)
    dlogits = reference.token_logprobs_vjp(logits, targets, np.append(dout[1:], 0.0), **options)["logits"]
    return np.append(0.0, logprobs[:-1]), backward(dlogits)


# -- pairs -------------------------------------------------------------------------------------------------------------


def pairs() -> list[list[Document]]:
    """Microbatches of two pairs, of one and of three, whose documents differ much in length and start with prompts.

    In the last one turns are masked too, and a document has one token.
    """
    return [
        documents(40, 9, 30, 60, prompt=0.3, seed=11),
        documents(80, 70, prompt=0.1, seed=12),
        documents(12, 33, 90, 1, 21, 20, prompt=0.2, turn=5, seed=13),
    ]


def check_preference(
    judge: Judge,
    drawn: Sequence[Sequence[Document]],
    *,
    beta: float = BETA,
    case: DecoderCase | None = None,
    capacity: int = 96,
    dtype: str | None = None,
) -> None:
    """Loss and gradients are those of every document run alone, as a mean over all pairs."""
    case, dtype = case or DecoderCase(), dtype or judge.dtype
    keywords: dict[str, Any] = {"capacity": capacity, "beta": beta, "dtype": dtype}
    answer = judge.ask("preference", case.decoder(), drawn, **keywords, options=whole_models.options_of(case))
    every = [document for microbatch in drawn for document in microbatch]
    truth = []
    for arithmetic in ("float64", dtype):
        parts = [
            _pair_alone(judge, case, chosen, rejected, beta, arithmetic)
            for chosen, rejected in zip(every[::2], every[1::2], strict=True)
        ]
        mean = {name: np.mean([gradients[name] for _, gradients in parts], axis=0) for name in parts[0][1]}
        truth.append((np.array([np.mean([one for one, _ in parts])]), mean))
    whole_models.check_mean(judge, answer, Expected(*truth), dtype)


def _pair_alone(
    judge: Judge, case: DecoderCase, chosen: Document, rejected: Document, beta: float, dtype: str
) -> tuple[float, Gradients]:
    if judge.backend.capabilities.own_model:
        capacity = max(len(chosen.input_ids), len(rejected.input_ids))
        options: dict[str, Any] = {"capacity": capacity, "beta": beta, "dtype": dtype}
        return judge.backend.preference(case.decoder(), [[chosen, rejected]], **options)
    sums, backs = [], []
    for document in (chosen, rejected):
        logits, backward = numpy_decoder.alone(case.decoder(), document.input_ids, dtype=dtype)  # type: ignore[arg-type]
        targets = np.append(document.labels[1:], -100)
        logprobs, _ = reference.token_logprobs(logits, targets, dtype=dtype)  # type: ignore[arg-type]
        (rounded,) = operands(dtype, logprobs)  # type: ignore[arg-type]
        sums.append(float(rounded.sum()))
        backs.append((logits, targets, backward))
    margin = beta * (sums[0] - sums[1])
    slope = -beta / (1 + np.exp(margin))
    gradients: Gradients = {}
    for (logits, targets, backward), sign in zip(backs, (slope, -slope), strict=True):
        dlogits = reference.token_logprobs_vjp(logits, targets, np.full(len(targets), sign), dtype=dtype)["logits"]  # type: ignore[arg-type]
        for name, x in backward(dlogits).items():
            gradients[name] = gradients.get(name, 0.0) + x
    return float(np.logaddexp(0.0, -margin)), gradients
