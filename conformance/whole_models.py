"""Questions to whole models and trainers: documents in, per-document truth beside the packed answer.

A backend that takes the suite's `Decoder` is held against the numpy decoder in float64; one with a model of its own
(`Capabilities.own_model`) against that model in "float64", with one document per row. Either way the budget comes from
the same per-document run in the working dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance import oracle
from conformance.draws import ONE_LAYER, DecoderCase, Rows, altered, documents, lay_out, untrained
from conformance.judge import Judge, NotDeclared, Rejected, as_result
from conformance.oracle import Expected
from packing_core.protocol import ADAMW_EPSILON, Array, Batch, DecoderConfig, Document, Gradients, segments

Steps = Sequence[Sequence[Sequence[Document]]]
WIDTH = 96
RATES = {"sgd": 0.1, "adamw": 0.01}


def collated(judge: Judge, documents: Sequence[Document], capacity: int) -> Batch:
    """The documents in rows: by the backend's own collator, or by the suite where it has none."""
    if judge.backend.provides("collate"):
        return judge.collate(documents, capacity)
    capacity = -(-capacity // WIDTH) * WIDTH  # few widths, for backends that compile each
    rows: list[list[int]] = []
    for document in documents:  # next fit
        length = len(document.input_ids)
        if not rows or sum(rows[-1]) + length > capacity:
            rows.append([])
        rows[-1].append(length)
    return lay_out(tuple((*row, sum(row) - capacity) if sum(row) < capacity else tuple(row) for row in rows), documents)


def places(batch: Batch, documents: Sequence[Document]) -> list[tuple[int, int, int]]:
    """Locates each document as ``(row, start, stop)``; documents of equal tokens are interchangeable."""
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


def long_case(judge: Judge) -> DecoderCase:
    """One layer and many words, for rows of hundreds of tokens."""
    return DecoderCase(
        DecoderConfig(vocab_size=judge.words, num_hidden_layers=1, max_position_embeddings=2048, rope_theta=500_000.0)
    )


def drawn(judge: Judge, *lengths: int, words: int | None = None) -> list[Document]:
    """Documents over many words, no longer than an own model takes; every other run of 16 tokens of some is masked."""
    capabilities = judge.backend.capabilities
    words = judge.words if words is None or capabilities.own_model else words
    longest = capabilities.longest if capabilities.own_model else max(lengths)
    lengths = tuple(min(length, longest) for length in lengths)
    turns = documents(*lengths, words=words, turn=16)
    return [
        turn if i % 3 == 2 else plain for i, (turn, plain) in enumerate(zip(turns, documents(*lengths, words=words)))
    ]


def one_layer_cases(judge: Judge) -> list[DecoderCase]:
    """The decoder of one layer, plain and with all that the backend declares of windows and of dynamic frequencies."""
    changes: dict[str, dict[str, Any]] = {
        "sliding_window": {"sliding_window": 4},
        "dynamic_rope": {"max_position_embeddings": 16, "dynamic_rope_factor": 4.0},
    }
    changed = ONE_LAYER
    for option in changes.keys() & judge.backend.capabilities.options:
        changed = replace(changed, **changes[option])
    return [DecoderCase(config) for config in dict.fromkeys((ONE_LAYER, changed))]


def forward(judge: Judge, case: DecoderCase, batch: Batch, dtype: str) -> Array:
    """Logits ``[B, S, V]`` of the backend."""
    logits = judge.ask("forward", case.decoder(), batch, dtype=dtype, options=_options(case, batch, judge))
    return np.asarray(logits, np.float64)


def gradients(judge: Judge, case: DecoderCase, batch: Batch, dtype: str) -> tuple[float, Gradients]:
    """Mean loss and weight gradients of the backend."""
    mean, of_weights = as_result(
        judge.ask("gradients", case.decoder(), batch, dtype=dtype, options=_options(case, batch, judge))
    )
    return float(mean), of_weights


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
    judge.within((np.array([mean]), found), _expected_gradients(judge, case, documents, dtype), None, dtype)


def check_shared(
    judge: Judge,
    documents: Sequence[Document],
    shared: int,
    case: DecoderCase | None = None,
    *,
    dtype: str | None = None,
) -> None:
    """Mean loss and weight gradients of documents that share beginnings are those of each document alone.

    Args:
        shared: tokens that all but one of the documents could do without, at least.
    """
    case, dtype = case or DecoderCase(), dtype or judge.dtype
    *answer, computed = judge.ask(
        "shared_gradients", case.decoder(), documents, dtype=dtype, options={"shared_prefixes"}
    )
    whole = sum(len(document.input_ids) for document in documents)
    judge.holds(
        computed <= whole - shared, f"{computed} of {whole} tokens were computed: a common beginning counts once"
    )
    check_mean(judge, answer, _expected_gradients(judge, case, documents, dtype), dtype)


def check_cut(
    judge: Judge,
    documents: Sequence[Document],
    ranks: int,
    config: DecoderConfig | None = None,
    *,
    dtype: str | None = None,
) -> None:
    """Mean loss and weight gradients of documents that are cut over ranks are those of each document alone.

    Args:
        documents: of which the longest has more tokens than a rank's share.
        config: of the decoder.
    """
    case, dtype = DecoderCase(config or DecoderConfig()), dtype or judge.dtype
    options = {"cut_documents"} | options_of(case)
    *answer, held = judge.ask("context_gradients", case.decoder(), documents, ranks=ranks, dtype=dtype, options=options)
    lengths = [len(document.input_ids) for document in documents]
    judge.equal("number of ranks", len(held), ranks)
    judge.equal("tokens of all ranks", sum(held), sum(lengths))
    judge.holds(
        max(held) < max(lengths), f"a rank computed {max(held)} tokens, and the document of {max(lengths)} is to be cut"
    )
    check_mean(judge, answer, _expected_gradients(judge, case, documents, dtype), dtype)


def check_mean(judge: Judge, answer: Any, expected: Expected, dtype: str) -> None:
    """A mean and the gradients of all weights are within the budget."""
    mean, of_weights = as_result(answer)
    judge.within((mean.reshape(1), of_weights), expected, None, dtype)


def _expected_gradients(judge: Judge, case: DecoderCase, documents: Sequence[Document], dtype: str) -> Expected:
    """Mean loss and gradients of the documents, each run alone."""
    if judge.backend.capabilities.own_model:
        return Expected(*(_own_gradients(judge, case, documents, arithmetic) for arithmetic in ("float64", dtype)))
    return oracle.gradients(case, documents, dtype)  # type: ignore[arg-type]


def train(
    judge: Judge,
    case: DecoderCase,
    steps: Steps,
    *,
    capacity: int,
    optimizer: str = "sgd",
    ranks: int = 1,
    dtype: str = "float32",
    rate: float | None = None,
) -> tuple[Array, Gradients]:
    """Losses ``[steps]`` and final weights of the backend's trainer."""
    chosen = {"adamw": optimizer == "adamw", "ranks": ranks > 1, "mixed_precision": dtype != "float32"}
    taken = options_of(case) | {name for name in chosen if chosen[name]}
    answer = judge.ask(
        "train", case.decoder(), steps, capacity=capacity, dtype=dtype, optimizer=optimizer, ranks=ranks,
        learning_rate=RATES[optimizer] if rate is None else rate, options=taken,
    )  # fmt: skip
    return as_result(answer)


def check_train(
    judge: Judge,
    case: DecoderCase,
    steps: Steps,
    *,
    capacity: int,
    optimizer: str = "sgd",
    ranks: int = 1,
    dtype: str = "float32",
) -> None:
    """Losses and final weights are those of training on each step's documents, each run alone."""
    answer = train(judge, case, steps, capacity=capacity, optimizer=optimizer, ranks=ranks, dtype=dtype)
    if judge.backend.capabilities.own_model:
        alone = [[[document] for microbatch in step for document in microbatch] for step in steps]
        options: Any = {"learning_rate": RATES[optimizer], "optimizer": optimizer, "capacity": capacity}
        exact, rounded = (
            judge.backend.train(case.decoder(), alone, dtype=arithmetic, **options) for arithmetic in ("float64", dtype)
        )
        expected = Expected(as_result(exact), as_result(rounded))
    else:
        expected = oracle.train(case, steps, learning_rate=RATES[optimizer], optimizer=optimizer, dtype=dtype)  # type: ignore[arg-type]
    judge.within(answer, expected, None, dtype, only="out")
    for name in expected.exact[1]:  # the weights stay float32 whatever the step computes in
        judge.within(answer, expected, None, "float32", only=name)


def check_one_step(judge: Judge, optimizer: str) -> None:
    """One step moves every weight by its rule from the gradients of the step's documents, each run alone."""
    case, rate = DecoderCase(), RATES[optimizer]
    step = [documents(40, 9, 30), documents(25, 8, turn=4)]
    together = [document for microbatch in step for document in microbatch]
    _, weights = train(judge, case, [step], capacity=96, optimizer=optimizer)
    if judge.backend.capabilities.own_model:
        if not judge.backend.provides("gradients"):
            raise NotDeclared("no gradients")  # which say how far the weights of an own model must move
        _, start = train(judge, case, [step], capacity=96, optimizer=optimizer, rate=0.0)
        found = [_own_gradients(judge, case, together, dtype)[1] for dtype in ("float64", "float32")]
    else:
        start = {name: np.asarray(w, np.float64) for name, w in case.decoder().weights.items()}
        expected = oracle.gradients(case, together, "float32")
        found = [expected.exact[1], expected.rounded[1]]
    lost = sorted(set(found[0]) - set(start))
    judge.holds(not lost, f"the trainer returns no weight {', '.join(lost)}")
    exact, rounded = ({name: start[name] - rate * _direction(g, optimizer) for name, g in x.items()} for x in found)
    none = np.zeros(1)
    judge.within((none, weights), Expected((none, exact), (none, rounded)), None, "float32")


def _direction(gradient: Array, optimizer: str) -> Array:
    """Returns the gradient of the first step, from AdamW's bias-corrected moments: the gradient and its square."""
    return gradient if optimizer == "sgd" else gradient / (np.abs(gradient) + ADAMW_EPSILON)


def check_isolated(
    judge: Judge,
    case: DecoderCase,
    drawn: Sequence[Document],
    capacity: int,
    *,
    dtype: str | None = None,
    where: Sequence[int] | None = None,
) -> None:
    """Exchanging every token of one document (of those in ``where``) moves its own logits and no other document's."""
    call = packed_call(judge, drawn, capacity, lambda batch: forward(judge, case, batch, dtype or judge.dtype))
    check_moves_alone(judge, drawn, call, "logits", where)


def packed_call(
    judge: Judge, drawn: Sequence[Document], capacity: int, call: Callable[[Batch], Array]
) -> Callable[[Sequence[Document]], list[Array]]:
    """``call`` of a batch ``[B, S, ..]``, as a function from documents as long as ``drawn`` to each one's numbers."""
    layout = collated(judge, drawn, capacity)
    where = places(layout, drawn)

    def run(documents: Sequence[Document]) -> list[Array]:
        batch = collated(judge, documents, capacity)
        judge.equal("layout of the batch", batch.segment_ids, layout.segment_ids)
        numbers = call(batch)
        return [numbers[row, start:stop] for row, start, stop in where]

    return run


def check_moves_alone(
    judge: Judge,
    drawn: Sequence[Document],
    call: Callable[[Sequence[Document]], Sequence[Array]],
    what: str,
    where: Sequence[int] | None = None,
) -> None:
    """Exchanging every token of one document (of those in ``where``) moves what ``call`` gives for it, and no other."""
    before = call(drawn)
    for number in range(len(drawn)) if where is None else where:
        after = call([altered(document) if i == number else document for i, document in enumerate(drawn)])
        for other in set(range(len(drawn))) - {number}:
            because = f"document {number} changed"
            judge.unmoved(f"{what} of document {other}", before[other], after[other], because=because)
        own = np.array_equal(before[number], after[number])
        judge.holds(not own, f"every token of document {number} changed and its {what} did not move")


def check_untrained_isolated(judge: Judge, case: DecoderCase, dtype: str) -> None:
    """Exchanging the tokens of documents without targets moves neither loss nor gradients; a trained one moves some."""
    some = documents(7, 16, 5, 33, 24, 11)
    silent = [untrained(document) if i in (1, 4) else document for i, document in enumerate(some)]
    exchanged = [altered(document) if i in (1, 4) else document for i, document in enumerate(silent)]

    def everything(drawn: Sequence[Document]) -> Gradients:
        mean, found = gradients(judge, case, collated(judge, drawn, 96), dtype)
        return {"the loss": np.array([mean])} | {f"the gradient of {name}": x for name, x in found.items()}

    before = everything(silent)
    noise = judge.noise(lambda: everything(silent), before)
    after = everything(exchanged)
    for name, x in before.items():
        judge.unmoved(name, x, after[name], because="untrained documents changed", noise=noise[name])
    moved = everything([altered(document) if i == 0 else document for i, document in enumerate(silent)])
    judge.holds(
        any(not np.array_equal(before[name], moved[name]) for name in before), "a trained document moved no gradient"
    )


def _options(case: DecoderCase, batch: Batch, judge: Judge) -> set[str]:
    """Lists what a call of `forward` or `gradients` takes beyond the plain decoder in the backend's own batches."""
    drawn = batch.native is None and judge.backend.provides("collate")
    return options_of(case) | ({"drawn_batches"} if drawn else set())


def options_of(case: DecoderCase) -> set[str]:
    """Lists what a decoder takes beyond the plain one."""
    taken = {
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
