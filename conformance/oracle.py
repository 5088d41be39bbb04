"""The oracle of every call: the reference run on each segment alone, put back where the segment stands.

`exact` is the float64 oracle and `rounded` the same with every operation rounded to the working dtype;
`packing_core.budget` makes a budget of the two. Both are computed once per case and shared by all backends of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from conformance import decoder as numpy_decoder
from conformance.decoder import Sums
from conformance.draws import AttentionCase, DecoderCase, LossCase, RopeCase, ScanCase, segment_ids
from packing_core import reference
from packing_core.protocol import Array, Document, Gradients, segments
from packing_core.reference import WorkingDtype

Result = tuple[Array, Gradients]
Key = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # tokens and labels of documents


@dataclass(frozen=True)
class Expected:
    """An array and gradients by the oracle, and by the reference rounded to the working dtype."""

    exact: Result
    rounded: Result


def _both(compute: Callable[[WorkingDtype], Result], dtype: WorkingDtype) -> Expected:
    return Expected(compute("float64"), compute(dtype))


@cache
def attention(case: AttentionCase, dtype: WorkingDtype) -> Expected:
    """``[B, S, H, E]`` and the gradients of ``q``, ``k``, ``v`` and, when given, ``sinks``."""
    arguments = case.arguments(dtype)
    dout = arguments.pop("dout")
    per_head = {name: arguments.pop(name) for name in ("sinks", "alibi_slopes") if name in arguments}
    spans = arguments.pop("spans", None)
    index = [arguments.pop(name) for name in ("index_q", "index_k", "index_weights") if name in arguments]
    ids = segment_ids(case.rows)

    def compute(arithmetic: WorkingDtype) -> Result:
        real, bounds = _compact(ids)
        q, k, v, d = (_take(x, real) for x in (*arguments.values(), dout))
        options: Any = {**case.options(), **per_head, "dtype": arithmetic}
        options.pop("context_ranks", None)
        if (top_k := options.pop("top_k", None)) is not None:
            index_q, index_k, weights = (_take(x, real) for x in index)
            block = options.pop("index_block", 1)
            options["selected"] = reference.select(index_q, index_k, weights, bounds, top_k=top_k, block=block)
        if spans is not None:
            options["spans"] = _take(spans, real)
        out = reference.attention(q, k, v, bounds, **options)
        found = reference.attention_vjp(q, k, v, bounds, d, **options)
        gradients = {name: _put(found[name], real, ids) for name in ("q", "k", "v")}
        if case.sinks:
            gradients["sinks"] = found["sinks"]
        return _put(out, real, ids), gradients

    return _both(compute, dtype)


def index_loss(case: AttentionCase, dout: Array, dtype: WorkingDtype) -> Expected:
    """``[N]`` and the gradients of an indexer's operands."""
    return _index_loss(case, tuple(dout.tolist()), dtype)


@cache
def _index_loss(case: AttentionCase, gradients: tuple[float, ...], dtype: WorkingDtype) -> Expected:
    dout = np.array(gradients)
    arrays, ids = case.index_arguments(dtype), segment_ids(case.rows)
    assert case.top_k is not None
    real, bounds = _compact(ids)
    operands: dict[str, Any] = {name: _take(x, real) for name, x in arrays.items()}
    index_q, index_k, weights, _, _ = operands.values()
    selected = reference.select(index_q, index_k, weights, bounds, top_k=case.top_k)
    options: dict[str, Any] = {**operands, "cu_seqlens": bounds, "selected": selected}

    def compute(arithmetic: WorkingDtype) -> Result:
        losses = reference.index_loss(**options, dtype=arithmetic)
        found = reference.index_loss_vjp(**options, dout=dout, dtype=arithmetic)
        return losses, {name: _put(x, real, ids) for name, x in found.items()}

    return _both(compute, dtype)


@cache
def rope(case: RopeCase, dtype: WorkingDtype) -> Expected:
    """``[B, S, H, D]`` and the gradient of ``x``."""
    arrays = case.arguments(dtype)
    rows, width = arrays["x"].shape[:2]

    def compute(arithmetic: WorkingDtype) -> Result:
        x, dout = (arrays[name].reshape(rows * width, *arrays[name].shape[2:]) for name in ("x", "dout"))
        where = arrays["position_ids"].ravel(), arrays["inv_freq"]
        out = reference.rope(x, *where, interleaved=case.interleaved, dtype=arithmetic)
        dx = reference.rope_vjp(x, *where, dout, interleaved=case.interleaved, dtype=arithmetic)["x"]
        return out.reshape(arrays["x"].shape), {"x": dx.reshape(arrays["x"].shape)}

    return _both(compute, dtype)


@cache
def scan(case: ScanCase, dtype: WorkingDtype) -> Expected:
    """``[B, S, M]`` and the gradients of ``x``, ``dt``, ``A``, ``B``, ``C``."""
    arrays = case.arguments(dtype)
    ids = segment_ids(case.rows)

    def compute(arithmetic: WorkingDtype) -> Result:
        real, bounds = _compact(ids)
        flat = {name: x if name == "A" else _take(x, real) for name, x in arrays.items()}
        dout = flat.pop("dout")
        out = reference.selective_scan(**flat, cu_seqlens=bounds, dtype=arithmetic)
        found = reference.selective_scan_vjp(**flat, cu_seqlens=bounds, dy=dout, dtype=arithmetic)
        return _put(out, real, ids), {name: x if name == "A" else _put(x, real, ids) for name, x in found.items()}

    return _both(compute, dtype)


@cache
def loss(case: LossCase, dtype: WorkingDtype) -> tuple[Expected, float]:
    """The loss sum ``[1]`` with the gradient of ``logits``, and the weight sum."""
    arrays = case.arguments(dtype)
    ids = segment_ids(case.rows)
    # A label trains the logits one token earlier, if that token is of the same segment.
    targets = np.full(ids.shape, -100)
    weights = np.zeros(ids.shape)
    trained = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    targets[:, :-1][trained] = arrays["labels"][:, 1:][trained]
    weights[:, :-1] = arrays.get("token_weights", np.ones(ids.shape))[:, 1:]
    flat = arrays["logits"].reshape(ids.size, -1), targets.ravel()

    def compute(arithmetic: WorkingDtype) -> Result:
        total, _ = reference.cross_entropy(*flat, weights=weights.ravel(), dtype=arithmetic)
        found = reference.cross_entropy_vjp(*flat, weights=weights.ravel(), dtype=arithmetic)["logits"]
        return np.array([total]), {"logits": found.reshape(arrays["logits"].shape)}

    return _both(compute, dtype), float(weights[targets != -100].sum())


@cache
def _logits_alone(case: DecoderCase, tokens: tuple[int, ...], dtype: WorkingDtype) -> Array:
    return numpy_decoder.alone(case.decoder(), np.array(tokens), dtype=dtype)[0]


def logits(case: DecoderCase, document: Document, dtype: WorkingDtype) -> Array:
    """``[n, V]`` of one document alone."""
    return _logits_alone(case, tuple(document.input_ids.tolist()), dtype)


def gradients(case: DecoderCase, documents: Sequence[Document], dtype: WorkingDtype) -> Expected:
    """The mean loss ``[1]`` over the documents' trained labels, each run alone, and the weights' gradients.

    The largest errors of a model's gradients lie in a few tokens, where the errors of one run may cancel by chance. So
    in half precision each gradient is rounded in two ways, with every operation rounded and with rope and attention in
    float32, as kernels have them, and the one counts that lies farther from the oracle.
    """

    def compute(arithmetic: WorkingDtype, mixing: WorkingDtype | None = None) -> Result:
        mean, by_weight = numpy_decoder.mean(_sums(case, _key(documents), arithmetic, mixing))
        return np.array([mean]), by_weight

    expected = _both(compute, dtype)
    if dtype in ("float64", "float32"):
        return expected
    (loss, rounded), (_, fused), exact = expected.rounded, compute(dtype, "float32"), expected.exact[1]

    def farther(name: str) -> Array:
        return max((rounded[name], fused[name]), key=lambda x: float(np.abs(x - exact[name]).max()))

    return Expected(expected.exact, (loss, {name: farther(name) for name in exact}))


def _key(documents: Sequence[Document]) -> Key:
    return tuple((tuple(d.input_ids.tolist()), tuple(d.labels.tolist())) for d in documents)


@cache
def _sums(case: DecoderCase, documents: Key, dtype: WorkingDtype, mixing: WorkingDtype | None) -> Sums:
    """Loss, weight and gradients summed over documents, under the weights that the case starts from."""
    decoder, drawn = case.decoder(), [Document(np.array(ids), np.array(labels)) for ids, labels in documents]
    each = (numpy_decoder.one_document(decoder, document, dtype=dtype, mixing=mixing) for document in drawn)
    return numpy_decoder.summed(each)


def train(
    case: DecoderCase,
    steps: Sequence[Sequence[Sequence[Document]]],
    *,
    learning_rate: float,
    optimizer: str,
    dtype: WorkingDtype,
) -> Expected:
    """Losses ``[steps]`` and final weights of training on each step's documents, each run alone.

    Gradients are of the working dtype; weights and the optimizer's state stay float32 (mixed precision).
    """

    def compute(arithmetic: WorkingDtype) -> Result:
        kept: WorkingDtype = "float64" if arithmetic == "float64" else "float32"
        model, state, losses = case.decoder(), numpy_decoder.State(), []
        for number, microbatches in enumerate(steps, start=1):
            if number == 1:
                keys = map(_key, microbatches)
                sums = numpy_decoder.summed(_sums(case, key, arithmetic, None) for key in keys)
            else:
                every = [document for documents in microbatches for document in documents]
                sums = numpy_decoder.summed(numpy_decoder.one_document(model, d, dtype=arithmetic) for d in every)
            mean, found = numpy_decoder.mean(sums)
            losses.append(mean)
            model = numpy_decoder.updated(
                model, found, state, step=number, learning_rate=learning_rate, optimizer=optimizer, dtype=kept
            )
        return np.array(losses), dict(model.weights)

    return _both(compute, dtype)


def _compact(ids: Array) -> tuple[Array, list[int]]:
    """Flat indexes of the real tokens, and the segments' boundaries among them."""
    lengths = [stop - start for _, start, stop in segments(ids)]
    return np.flatnonzero(ids), [0, *accumulate(lengths)]


def _take(x: Array, real: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])[real]


def _put(x: Array, real: Array, ids: Array) -> Array:
    out = np.zeros((ids.size, *x.shape[1:]), x.dtype)
    out[real] = x
    return out.reshape(*ids.shape, *x.shape[1:])
