"""The table of cases beyond the sizes for which an implementation may hold a constant, and the special data: SIZE.

`CASES` has the cases of each requirement by what is large in them, as SPEC.md states it. All other sizes of a case are
small, so that it costs what a small one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance import audio, checks, expert_cases, reductions, scan_cases, whole_models
from conformance.audio import ClipsCase
from conformance.draws import (
    FULL,
    MANY_ROWS,
    AttentionCase,
    DecoderCase,
    LossCase,
    RopeCase,
    Rows,
    ScanCase,
    documents,
    generator,
    grown,
    segment_ids,
)
from conformance.expert_cases import ExpertsCase
from conformance.judge import ORACLES, Judge
from conformance.naive import best_fit_decreasing
from conformance.reductions import HOW, ReduceCase
from conformance.scan_cases import ConvolutionCase, DeltaCase, SsdCase
from packing_core.protocol import DecoderConfig, Document, segments

# Segments that start at 64, 100, 128, 192, 200, 256, 512, 1,000 and 1,024 tokens of a row.
STARTS = (64, 36, 28, 64, 8, 56, 256, 488, 24, 76)
SHORT = (4, 3) * 150
LONG: Rows = ((1100,), STARTS, (*SHORT, -50))
MANY: Rows = MANY_ROWS[:3] * 14
OVER_RANKS: Rows = ((1100,), (600, 500))
WINDOWED: Rows = ((500, 201, 199, 200),)
SPANNED: Rows = ((-100, 300, -200) + (2,) * 200 + (-100,),)
# A root, a chain of 20 segments that go on from one another, and 20 that go on from the root.
FOREST: Rows = ((70,) + (2,) * 40 + (-10,),)
PARENTS = (-1, *range(20), *(0,) * 20)
# Under a strong decay alone the gradient of dt is a small difference of large sums; SCAN judges strong decays.
ONE_HEAD: dict[str, Any] = {"heads": 1, "groups": 1, "strongest": 2.0}


@dataclass(frozen=True)
class ModelCase:
    """Documents for the methods of a collator, a model or a trainer.

    Attributes:
        microbatches: lengths of documents; equal tuples are equal documents.
        again: so many documents of a microbatch, the first ones, come twice.
        beta: of `Backend.preference`.
        twins: the answers of each microbatch's first pair are equal.
    """

    microbatches: tuple[tuple[int, ...], ...]
    config: DecoderConfig = field(default_factory=DecoderConfig)
    capacity: int = 96
    again: int = 0
    ranks: int = 1
    beta: float = reductions.BETA
    twins: bool = False

    def drawn(self, judge: Judge) -> list[list[Document]]:
        """The documents of each microbatch."""
        each = [whole_models.drawn(judge, *lengths, words=self.config.vocab_size) for lengths in self.microbatches]
        if self.twins:
            each = [[drawn[0], drawn[0], *drawn[2:]] for drawn in each]
        return [drawn + drawn[: self.again] for drawn in each]


@dataclass(frozen=True)
class TreeCase:
    """Answers for `Backend.shared_gradients`.

    Attributes:
        prompt: tokens of the common beginning.
        answers: their lengths.
        levels: at how many places documents part; on each but the last one ends and one goes on.
        again: so many of the last documents come twice.
        trained: the common beginnings are trained on too.
    """

    prompt: int = 24
    answers: tuple[int, ...] = (9, 1, 14)
    levels: int = 1
    again: int = 0
    trained: bool = False

    def drawn(self) -> list[Document]:
        """The documents."""
        found, stems = [], documents(self.prompt)
        for level in range(1, self.levels):
            end, *stems = grown(stems, (5, 17), seed=level, trained=self.trained)
            found.append(end)
        found += grown(stems, self.answers, seed=99, trained=self.trained)
        return found + found[len(found) - self.again :]


def _decoder(**changed: Any) -> DecoderConfig:
    return DecoderConfig(**{"num_hidden_layers": 1, "max_position_embeddings": 2048, **changed})


ALL_LENGTHS = (1100, 50, *SHORT)  # two rows, of which one holds 301 documents
MODELS = {
    "1,100 tokens and 302 documents": ModelCase((ALL_LENGTHS,), _decoder(), 1100),
    "40 heads and widths of 320 and 300": ModelCase(
        ((7, 16, 33, 24),),
        _decoder(num_attention_heads=40, num_key_value_heads=40, hidden_size=320, intermediate_size=300),
    ),
    "12 layers and 42 rows, two of equal documents": ModelCase(
        ((16,) * 41,), _decoder(num_hidden_layers=12), 16, again=1
    ),
    "262,144 words": ModelCase(((9, 5),), _decoder(vocab_size=262_144, hidden_size=16, num_attention_heads=2)),
}
MOSTLY_EQUAL = (*((9, 14), (12, 5)) * 20, (30, 7), (21, 20))
WINDOW = ModelCase(((500, 201, 199, 200),), _decoder(sliding_window=200), 1100)

LENGTHS, LENGTHS_OF_DOCUMENTS = "1,100 tokens and 300 documents", "1,100 tokens and 302 documents"

CASES: dict[str, dict[str, Any]] = {
    "SIZE-01": {
        LENGTHS_OF_DOCUMENTS: ModelCase((ALL_LENGTHS,), capacity=1100),
    },
    "SIZE-02": {
        f"{LENGTHS_OF_DOCUMENTS}, half of them twice": ModelCase((ALL_LENGTHS,), capacity=1100, again=151),
        "42 rows": ModelCase(((16,) * 42,), capacity=16),
    },
    "SIZE-03": {
        LENGTHS: AttentionCase(LONG, heads=1, kv_heads=1),
        "42 rows": AttentionCase(MANY, heads=1, kv_heads=1),
        "40 heads": AttentionCase(FULL, heads=40, kv_heads=40),
    },
    "SIZE-04": {
        "a window of 200": AttentionCase(WINDOWED, heads=1, kv_heads=1, window=200),
        "40 key/value heads": AttentionCase(FULL, heads=80, kv_heads=40),
        "40 heads of a group": AttentionCase(FULL, heads=40, kv_heads=1),
        "widths 320 and 256": AttentionCase(FULL, heads=1, kv_heads=1, width=320, value_width=256),
        "40 sinks": AttentionCase(FULL, heads=40, kv_heads=40, sinks=True),
        "40 slopes": AttentionCase(FULL, heads=40, kv_heads=40, alibi=True),
        f"{LENGTHS} in both directions": AttentionCase(LONG, heads=1, kv_heads=1, causal=False),
        "200 spans, one of 300 tokens": AttentionCase(((700, 400),), heads=1, kv_heads=1, spans=SPANNED),
        "4 ranks": AttentionCase(OVER_RANKS, heads=1, kv_heads=1, context_ranks=4),
        "a window over two of them": AttentionCase(OVER_RANKS, heads=1, kv_heads=1, window=600, context_ranks=4),
    },
    "SIZE-05": {
        LENGTHS: RopeCase(LONG, heads=1),
        "42 rows": RopeCase(MANY),
        "40 heads of width 256": RopeCase(heads=40, width=256, turned=256),
    },
    "SIZE-06": {
        "40 heads of width 256, interleaved": RopeCase(heads=40, width=256, turned=256, interleaved=True),
        "256 of 320 channels turned": RopeCase(heads=40, width=320, turned=256),
    },
    "SIZE-07": {
        LENGTHS: ScanCase(LONG, channels=4, states=2),
        "42 rows": ScanCase(MANY, channels=4, states=2),
        "300 channels": ScanCase(channels=300, states=2),
        "256 states": ScanCase(channels=2, states=256),
    },
    "SIZE-08": {
        LENGTHS: DeltaCase(LONG, heads=1, key_heads=1),
        "42 rows": DeltaCase(MANY, heads=1, key_heads=1),
        "40 heads": DeltaCase(FULL, heads=40, key_heads=40),
        "beta to 2": DeltaCase(scan_cases.ON_EDGES, strongest=2.0),
    },
    "SIZE-09": {
        "width 256": DeltaCase(FULL, heads=1, key_heads=1, width=256, value_width=256),
        "40 key heads": DeltaCase(FULL, heads=80, key_heads=40),
        "40 heads of a group": DeltaCase(FULL, heads=40, key_heads=1),
        f"{LENGTHS} with channel decays": DeltaCase(LONG, heads=1, key_heads=1, by_channel=True),
        "40 normalised heads": DeltaCase(FULL, heads=40, key_heads=40, normalise=True),
        "21 levels and 20 children": DeltaCase(FOREST, parents=PARENTS),
    },
    "SIZE-10": {
        LENGTHS: SsdCase(LONG, **ONE_HEAD),
        "42 rows": SsdCase(MANY, **ONE_HEAD),
        "40 groups": SsdCase(FULL, heads=80, groups=40),
        "40 heads of a group": SsdCase(FULL, heads=40, groups=1),
        "width 256": SsdCase(FULL, **ONE_HEAD, width=256),
        "256 states": SsdCase(FULL, **ONE_HEAD, states=256),
    },
    "SIZE-11": {"21 levels and 20 children": SsdCase(FOREST, parents=PARENTS)},
    "SIZE-12": {
        LENGTHS: ConvolutionCase(LONG),
        "42 rows": ConvolutionCase(MANY),
        "width 2": ConvolutionCase(FULL, width=2),
        "width 3": ConvolutionCase(FULL, width=3),
        "300 channels": ConvolutionCase(FULL, channels=300),
    },
    "SIZE-13": {"21 levels and 20 children": ConvolutionCase(FOREST, parents=PARENTS)},
    "SIZE-14": {
        "3,250 tokens of an expert": ExpertsCase(LONG, routing="one"),
        "42 rows": ExpertsCase(MANY),
        "40 experts": ExpertsCase(experts=40),
        "40 choices": ExpertsCase(experts=40, top_k=40),
        "widths 256 and 300": ExpertsCase(width=256, inner=300),
    },
    "SIZE-15": {
        "40 biased experts": ExpertsCase(experts=40, biased=True, activation=expert_cases.CLAMPED),
        "40 experts without gates": ExpertsCase(experts=40, activation=expert_cases.UNGATED),
    },
    "SIZE-16": {
        LENGTHS: LossCase(LONG, words=12),
        "42 rows": LossCase(MANY),
        "262,144 words": LossCase(((5, 3),), words=262_144),
    },
    "SIZE-17": {
        "negative weights and zeros": LossCase(FULL, weighted=True, signed=True),
        f"{LENGTHS} of them": LossCase(LONG, words=12, weighted=True, signed=True, masked=0.2),
    },
    "SIZE-18": {
        LENGTHS: [ReduceCase(LONG, how) for how in HOW],
        "42 rows": [ReduceCase(MANY, how) for how in HOW],
        "84 pieces of a document": [ReduceCase(MANY, how, pieces=(tuple(range(84)),)) for how in HOW],
    },
    "SIZE-19": MODELS,
    "SIZE-20": {"a window of 200": WINDOW},
    "SIZE-21": MODELS,
    "SIZE-22": MODELS,
    "SIZE-23": {
        "a prompt of 1,100 tokens": TreeCase(1100, (300, 1)),
        "40 answers": TreeCase(answers=(3,) * 40),
        "8 levels": TreeCase(levels=8),
        "equal answers": TreeCase(again=1),
        "targets in what is shared": TreeCase(trained=True, levels=2),
    },
    "SIZE-24": {
        "1,100 tokens and 301 documents over 4 ranks": ModelCase(
            ((*(1, 2) * 75, 1100, *(1, 2) * 75),), _decoder(), ranks=4
        ),
        "a window over three of them": ModelCase(((9, 330, 1, 60),), _decoder(sliding_window=250), ranks=4),
    },
    "SIZE-25": {
        LENGTHS_OF_DOCUMENTS: ModelCase((ALL_LENGTHS,), _decoder(), 1100),
        "42 microbatches, most of equal documents": ModelCase((*((9, 5), (30,)) * 20, (60, 20), (44,))),
    },
    "SIZE-26": {"4 ranks": ModelCase(((9, 5), (30,), (60, 20)) * 2, ranks=4)},
    "SIZE-27": {
        "150 pairs": ModelCase((SHORT,)),
        "1,100 tokens": ModelCase(((1100, 600),), _decoder(), 1100),
        "42 microbatches, most of equal pairs, beta 2": ModelCase(MOSTLY_EQUAL, again=2, beta=2.0),
        "equal answers": ModelCase(((9, 14, 30, 7), (12, 5)), twins=True, beta=2.0),
    },
    "SIZE-28": {
        LENGTHS_OF_DOCUMENTS: ModelCase((ALL_LENGTHS,), _decoder()),
    },
    "SIZE-29": {
        LENGTHS: AttentionCase(LONG, heads=1, kv_heads=1, top_k=300),
        "42 rows": AttentionCase(MANY, heads=1, kv_heads=1, top_k=4),
        "a choice of 300 keys": AttentionCase(((1100,),), heads=1, kv_heads=1, top_k=300),
    },
    "SIZE-30": {
        "1,100 frames and 301 clips": ClipsCase((1100, *SHORT), (2, 2, 2)),
        "300 channels": ClipsCase(channels=(300, 300, 300)),
    },
}


def check_plan(judge: Judge, case: ModelCase) -> None:
    """Rows hold every document once, and as many tokens as the textbook's."""
    (lengths,) = map(list, case.microbatches)
    rows = judge.ask("plan", lengths, case.capacity, strategy="best_fit")
    judge.equal("the documents in all rows", sorted(d for row in rows for d in row), range(len(lengths)))
    got, textbook = (
        sorted(sum(lengths[d] for d in row) for row in found)
        for found in (rows, best_fit_decreasing(lengths, case.capacity))
    )
    judge.equal("tokens per row", got, textbook)


def check_collate(judge: Judge, case: ModelCase) -> None:
    """Every document stands once, with its labels and positions, in segments that count from 1."""
    (drawn,) = case.drawn(judge)
    batch = judge.collate(drawn, case.capacity)
    every = segments(batch.segment_ids)
    judge.equal("number of segments", len(every), len(drawn))
    rows = [row for row, _, _ in every]
    numbers = [batch.segment_ids[row, start] for row, start, _ in every]
    judge.equal("segment ids", numbers, [rows[: i + 1].count(row) for i, row in enumerate(rows)])
    for document, (row, start, stop) in zip(drawn, whole_models.places(batch, drawn), strict=True):
        judge.equal("labels", batch.labels[row, start:stop], np.append(-100, document.labels[1:]))
        judge.equal("positions", batch.position_ids[row, start:stop], np.arange(stop - start))


def check_reduce(judge: Judge, cases: list[ReduceCase]) -> None:
    """Results and gradients of each kind of reduction."""
    for case in cases:
        reductions.check_reduce(judge, case, only=None)


def check_forward(judge: Judge, case: ModelCase) -> None:
    """Logits of each document."""
    (drawn,) = case.drawn(judge)
    whole_models.check_logits(
        judge, DecoderCase(case.config), whole_models.collated(judge, drawn, case.capacity), drawn
    )


def check_gradients(judge: Judge, case: ModelCase) -> None:
    """Loss and gradients of the batch."""
    (drawn,) = case.drawn(judge)
    whole_models.check_gradients(
        judge, DecoderCase(case.config), whole_models.collated(judge, drawn, case.capacity), drawn
    )


def check_logprobs(judge: Judge, case: ModelCase) -> None:
    """Log-probabilities, and their gradients, of each document."""
    (drawn,) = case.drawn(judge)
    reductions.check_logprobs(judge, drawn, weights=None, case=DecoderCase(case.config), capacity=case.capacity)


def check_shared(judge: Judge, case: TreeCase) -> None:
    """Loss and gradients of each answer with its prompt; what is shared and not trained is computed once."""
    shared = 0 if case.trained else case.prompt
    whole_models.check_shared(judge, case.drawn(), shared, DecoderCase(_decoder(num_hidden_layers=2)))


def check_cut(judge: Judge, case: ModelCase) -> None:
    """Loss and gradients of documents over ranks."""
    (drawn,) = case.drawn(judge)
    whole_models.check_cut(judge, drawn, case.ranks, config=case.config)


def check_train(judge: Judge, case: ModelCase) -> None:
    """Losses and weights after all steps."""
    whole_models.check_train(
        judge, DecoderCase(case.config), [case.drawn(judge)], capacity=case.capacity, ranks=case.ranks
    )


def check_preference(judge: Judge, case: ModelCase) -> None:
    """The mean over pairs and its gradients."""
    reductions.check_preference(
        judge, case.drawn(judge), beta=case.beta, case=DecoderCase(case.config), capacity=case.capacity
    )


def check_embed(judge: Judge, case: ModelCase) -> None:
    """Vectors of documents, the mean of their tokens', and their gradients."""
    (drawn,) = case.drawn(judge)
    reductions.check_embed(judge, drawn, "mean", case=DecoderCase(case.config))


def check_index_loss(judge: Judge, case: AttentionCase) -> None:
    """Losses of an indexer and their gradients."""
    dout = generator("index_loss").standard_normal(len(segments(segment_ids(case.rows)))).astype(np.float32)
    checks.check_index_loss(judge, case, dout, judge.dtype)


CHECKS: dict[str, Callable[[Judge, Any], None]] = {
    "plan": check_plan,
    "collate": check_collate,
    **dict.fromkeys(ORACLES, Judge.check),
    "loss": Judge.loss,
    "reduce": check_reduce,
    "forward": check_forward,
    "gradients": check_gradients,
    "logprobs": check_logprobs,
    "shared_gradients": check_shared,
    "context_gradients": check_cut,
    "train": check_train,
    "preference": check_preference,
    "embed": check_embed,
    "index_loss": check_index_loss,
    "clips": audio.check,
}
