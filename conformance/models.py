"""Questions to whole models and trainers: documents in, per-document truth beside the packed answer.

A backend that takes the suite's `Decoder` is held against the numpy decoder in float64; one with a model of its own
(`Capabilities.own_model`) against that model in "float64", with one document per row. Either way the budget comes from
the same per-document run in the working dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance import oracle
from conformance.draws import DecoderCase, Rows, lay_out
from conformance.judge import Judge, Rejected
from conformance.oracle import Expected
from packing_core.protocol import Array, Batch, Document, Gradients, segments

Steps = Sequence[Sequence[Sequence[Document]]]


def collated(judge: Judge, documents: Sequence[Document], capacity: int) -> Batch:
    """The documents in rows: by the backend's own collator, or by the suite where it has none."""
    if judge.backend.provides("collate"):
        return judge.collate(documents, capacity)
    rows: list[list[int]] = []
    for document in documents:  # next fit
        length = len(document.input_ids)
        if not rows or sum(rows[-1]) + length > capacity:
            rows.append([])
        rows[-1].append(length)
    return lay_out(tuple((*row, sum(row) - capacity) if sum(row) < capacity else tuple(row) for row in rows), documents)


def places(batch: Batch, documents: Sequence[Document]) -> list[tuple[int, int, int]]:
    """Where each document stands, as ``(row, start, stop)``; documents of equal tokens are interchangeable."""
    found: dict[bytes, list[tuple[int, int, int]]] = {}
    for row, start, stop in segments(batch.segment_ids):
        tokens = np.asarray(batch.input_ids[row, start:stop], np.int64).tobytes()
        found.setdefault(tokens, []).append((row, start, stop))
    where = []
    for number, document in enumerate(documents):
        left = found.get(np.asarray(document.input_ids, np.int64).tobytes())
        if not left:
            raise Rejected(f"document {number} ({len(document.input_ids)} tokens) stands in no segment of the batch")
        where.append(left.pop(0))
    return where


def forward(judge: Judge, case: DecoderCase, batch: Batch, dtype: str) -> Array:
    """Logits ``[B, S, V]`` of the backend."""
    logits = judge.ask("forward", case.decoder(), batch, dtype=dtype, options=_options(case, batch, judge))
    return np.asarray(logits, np.float64)


def gradients(judge: Judge, case: DecoderCase, batch: Batch, dtype: str) -> tuple[float, Gradients]:
    """Mean loss and weight gradients of the backend."""
    mean, found = judge.ask("gradients", case.decoder(), batch, dtype=dtype, options=_options(case, batch, judge))
    return float(mean), {name: np.asarray(x, np.float64) for name, x in found.items()}


def check_logits(
    judge: Judge, case: DecoderCase, batch: Batch, documents: Sequence[Document], dtype: str | None = None
) -> None:
    """Every document's logits in the batch are those of the document alone."""
    dtype = dtype or judge.dtype
    logits = forward(judge, case, batch, dtype)
    where = places(batch, documents)
    exact, rounded = (
        [_alone(judge, case, document, arithmetic) for document in documents] for arithmetic in ("float64", dtype)
    )
    # One row of all documents, so that they share one budget and the message says which it was.
    row = np.repeat(np.arange(len(documents)), [len(x) for x in exact])[None] + 1
    answer = np.concatenate([logits[r, start:stop] for r, start, stop in where])[None]
    expected = Expected((np.concatenate(exact)[None], {}), (np.concatenate(rounded)[None], {}))
    judge.within((answer, {}), expected, row, dtype)


def check_gradients(
    judge: Judge, case: DecoderCase, batch: Batch, documents: Sequence[Document], dtype: str | None = None
) -> None:
    """The batch's mean loss and weight gradients are those of its documents, each run alone."""
    dtype = dtype or judge.dtype
    mean, found = gradients(judge, case, batch, dtype)
    if judge.backend.capabilities.own_model:
        exact, rounded = (_own_gradients(judge, case, documents, arithmetic) for arithmetic in ("float64", dtype))
        expected = Expected(exact, rounded)
    else:
        expected = oracle.gradients(case, documents, dtype)  # type: ignore[arg-type]
    judge.within((np.array([mean]), found), expected, None, dtype)


def train(
    judge: Judge, case: DecoderCase, steps: Steps, *, capacity: int, optimizer: str = "sgd", ranks: int = 1
) -> tuple[Array, Gradients]:
    """Losses ``[steps]`` and final weights of the backend's trainer, in float32."""
    options = {"adamw"} if optimizer == "adamw" else set()
    if ranks > 1:
        options.add("ranks")
    losses, weights = judge.ask(
        "train", case.decoder(), steps, capacity=capacity, learning_rate=_rate(optimizer), dtype="float32",
        optimizer=optimizer, ranks=ranks, options=options,
    )  # fmt: skip
    return np.asarray(losses, np.float64), {name: np.asarray(w, np.float64) for name, w in weights.items()}


def check_train(
    judge: Judge, case: DecoderCase, steps: Steps, *, capacity: int, optimizer: str = "sgd", ranks: int = 1
) -> None:
    """Losses and final weights are those of training on each step's documents, each run alone."""
    answer = train(judge, case, steps, capacity=capacity, optimizer=optimizer, ranks=ranks)
    flat = [[document for microbatch in step for document in microbatch] for step in steps]
    if judge.backend.capabilities.own_model:
        alone = [[[document] for document in step] for step in flat]
        expected = Expected(
            *(
                (np.asarray(losses, np.float64), weights)
                for losses, weights in (
                    judge.backend.train(
                        case.decoder(), alone, capacity=capacity, learning_rate=_rate(optimizer), dtype=arithmetic,
                        optimizer=optimizer,
                    )
                    for arithmetic in ("float64", "float32")
                )
            )
        )  # fmt: skip
    else:
        expected = oracle.train(case, flat, learning_rate=_rate(optimizer), optimizer=optimizer, dtype="float32")
    judge.within(answer, expected, None, "float32")


def _rate(optimizer: str) -> float:
    return {"sgd": 0.1, "adamw": 0.01}[optimizer]


def _options(case: DecoderCase, batch: Batch, judge: Judge) -> set[str]:
    """What a call of `forward` or `gradients` takes beyond the plain decoder in the backend's own batches."""
    taken = {
        "drawn_batches": batch.native is None and judge.backend.provides("collate"),
        "sliding_window": case.config.sliding_window is not None,
        "dynamic_rope": case.config.dynamic_rope_factor is not None,
    }
    return {name for name, is_taken in taken.items() if is_taken}


def _alone(judge: Judge, case: DecoderCase, document: Document, dtype: str) -> Array:
    """Logits ``[n, V]`` of one document in a row of its own."""
    if judge.backend.capabilities.own_model:
        length = len(document.input_ids)
        batch = collated(judge, [document], length)
        ((row, start, stop),) = places(batch, [document])
        return np.asarray(judge.backend.forward(case.decoder(), batch, dtype=dtype), np.float64)[row, start:stop]
    return oracle.logits(case, document, dtype)  # type: ignore[arg-type]


def _own_gradients(
    judge: Judge, case: DecoderCase, documents: Sequence[Document], dtype: str
) -> tuple[Array, Gradients]:
    """Mean loss ``[1]`` and gradients from the backend's own runs of one document each, weighted by trained labels."""
    total: Gradients = {}
    loss, weight = 0.0, 0
    for document in documents:
        trained = int((document.labels[1:] != -100).sum())
        if trained == 0:
            continue
        batch = collated(judge, [document], len(document.input_ids))
        mean, found = judge.backend.gradients(case.decoder(), batch, dtype=dtype)
        loss, weight = loss + trained * float(mean), weight + trained
        total = {name: total.get(name, 0.0) + trained * np.asarray(x, np.float64) for name, x in found.items()}
    return np.array([loss / weight]), {name: x / weight for name, x in total.items()}


def layout(documents: Sequence[Document], rows: Sequence[Sequence[int]]) -> tuple[Rows, list[Document]]:
    """The layout, and the documents in its order, of rows in which -n is n tokens of padding and else a document."""
    order = [documents[entry] for row in rows for entry in row if entry >= 0]
    lengths = tuple(tuple(len(documents[e].input_ids) if e >= 0 else e for e in row) for row in rows)
    return lengths, order
