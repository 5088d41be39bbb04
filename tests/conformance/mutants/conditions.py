"""Backends that are wrong under one condition alone.

In a layout, in a dtype with a layout, for a pair of options, for unusual values, in arrays of another order in memory;
and backends that change their arguments.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packing_core.protocol import segments
from tests.conformance.mutants.attention import Around
from tests.conformance.mutants.base import Mutant
from tests.conformance.mutants.calls import wrong
from tests.conformance.mutants.trainer import Training


def _larger(result):
    return result * 1.25


def _ids(arguments):
    return arguments["batch"].segment_ids if "batch" in arguments else arguments["segment_ids"]


def _lengths(arguments):
    return [stop - start for _, start, stop in segments(_ids(arguments))]


def _wrong_where(table, text, met):
    """Makes a mutant of each method, filed under its requirement, that is wrong where ``met(arguments)``."""
    for method, requirement in table.items():
        change = {"change": _larger} if method == "forward" else {}
        wrong(method, requirement, text, lambda backend, arguments: met(arguments), **change)


# -- layouts -----------------------------------------------------------------------------------------------------------

_OPERATIONS = {
    "scan": "SHAPE-09", "delta_rule": "SCAN-04", "ssd": "SCAN-14", "convolution": "SCAN-17", "experts": "EXP-01",
    "loss": "LOSS-04",
}  # fmt: skip
_MODELS = {"forward": "REP-03", "gradients": "GRAD-09", "logprobs": "DOC-08"}
_wrong_where(_OPERATIONS | _MODELS | {"attention": "SHAPE-03"}, "With one document", lambda a: len(_lengths(a)) == 1)
_wrong_where({"embed": "DOC-12", "shared_gradients": "TREE-01"}, "With one alone", lambda a: len(a["documents"]) == 1)
_wrong_where({"clips": "CLIP-01"}, "With one clip", lambda a: len(a["frames"]) == 1)
_wrong_where(
    _OPERATIONS | {"attention": "SHAPE-05", "index_loss": "SPARSE-06"}, "With documents alike",
    lambda a: len(set(_lengths(a))) == 1 and 1 < _lengths(a)[0] < _ids(a).shape[1],
)  # fmt: skip
_wrong_where(
    {
        "attention": "SHAPE-08", "scan": "SHAPE-09", "delta_rule": "SCAN-01", "ssd": "SCAN-11",
        "convolution": "SCAN-17", "loss": "PAD-06", "forward": "REP-04", "gradients": "REP-05",
    },
    "Where the first row is padding", lambda a: not _ids(a)[0].any() and _ids(a).any(),
)  # fmt: skip
_NARROW = {
    "attention": "DTYPE-01", "scan": "DTYPE-06", "loss": "DTYPE-07", "forward": "DTYPE-08", "gradients": "DTYPE-09",
    "index_loss": "SPARSE-07", "delta_rule": "SCAN-10", "ssd": "SCAN-16", "convolution": "SCAN-19", "experts": "EXP-08",
    "logprobs": "DOC-16",
}  # fmt: skip
for _text, _met in {
    "beside padding": lambda a: bool((_ids(a) == 0).any()),
    "in several rows": lambda a: len(_ids(a)) > 1,
    "beyond 64 tokens": lambda a: max(_lengths(a), default=0) > 64,
    "beyond 16 documents": lambda a: _ids(a).max() > 16,
}.items():
    _wrong_where(_NARROW, f"In float16 {_text}", lambda a, met=_met: a["dtype"] == "float16" and met(a))

_wrong_where({"logprobs": "DOC-09"}, "In float16 at a temperature",
             lambda a: a["dtype"] == "float16" and a.get("temperature", 1.0) != 1)  # fmt: skip
_wrong_where({"reduce": "DOC-15"}, "In float16 in pieces",
             lambda a: a["dtype"] == "float16" and max(map(len, a["documents"])) > 1)  # fmt: skip
_wrong_where(
    {"embed": "DOC-18"}, "In float16 of first tokens", lambda a: a["dtype"] == "float16" and a["how"] == "first"
)
_wrong_where({"clips": "CLIP-04"}, "In float16 beyond 64 frames",
             lambda a: a["dtype"] == "float16" and max(a["frames"]) > 64)  # fmt: skip


# -- pairs of options --------------------------------------------------------------------------------------------------


for _method, _requirement, _text, _met in (
    ("delta_rule", "SCAN-10", "Grouped and normalised",
     lambda a: a.get("normalise") and a["k"].shape[2] < a["v"].shape[2]),
    ("delta_rule", "SCAN-10", "Normalised and continued",
     lambda a: a.get("normalise") and a.get("parents") is not None),
    ("delta_rule", "SCAN-10", "Strong decays by channel", lambda a: a["g"].ndim == 4 and a["g"].mean() < -1),
    ("delta_rule", "SCAN-10", "Values wider than keys", lambda a: a["v"].shape[3] > a["q"].shape[3]),
    ("experts", "EXP-08", "Biases without gates", lambda a: "up_bias" in a and not a["activation"].gated),
    ("experts", "EXP-08", "Biases without a limit", lambda a: "up_bias" in a and a["activation"].limit is None),
    ("rope", "DTYPE-05", "Partial interleaved",
     lambda a: a.get("interleaved") and 2 * len(a["inv_freq"]) < a["x"].shape[3]),
    ("rope", "DTYPE-05", "Far interleaved", lambda a: a.get("interleaved") and a["position_ids"].max() > 32_767),
    ("attention", "MASK-14", "Spans with softcap", lambda a: a.get("spans") is not None and a.get("softcap")),
    ("attention", "MASK-14", "Ranks with sinks",
     lambda a: a.get("context_ranks", 1) > 1 and a.get("sinks") is not None),
    ("attention", "SPARSE-02", "Narrow values of keys that are selected",
     lambda a: a.get("top_k") and a["v"].shape[3] < a["q"].shape[3]),
):  # fmt: skip
    _wrong_where({_method: _requirement}, _text, _met)

_wrong_where(
    {"attention": "MASK-14", "delta_rule": "SCAN-10", "rope": "DTYPE-05", "experts": "EXP-08"},
    "In transposed arrays",
    lambda a: not a["x" if "x" in a else "q"].flags.c_contiguous,
)


class WindowOfOneLostInTheBackward(Mutant, rejected_by="MASK-02"):
    """The backward takes a window of 1 for none, as it has no distance to the left."""

    def _attend(self, *arrays, **options):
        out, backward = super()._attend(*arrays, **options)
        if options.get("window") == 1:
            _, backward = super()._attend(*arrays, **options | {"window": None})
        return out, backward


# -- values ------------------------------------------------------------------------------------------------------------


class FrequenciesOfItsOwn(Mutant, rejected_by="POS-02"):
    """The frequencies are powers of 10,000, whatever the caller's."""

    def angles(self, position_ids, inv_freq):
        pairs = inv_freq.shape[-1]
        return super().angles(position_ids, 10_000.0 ** (-np.arange(pairs) / pairs))


class LargeSinksOverflow(Around, rejected_by="MASK-05"):
    """The softmax subtracts the largest score, and a sink beyond it overflows."""

    overflows = False

    def arguments(self, arrays, options):
        self.overflows = options.get("sinks") is not None and options["sinks"].max() > 88

    def output(self, out, segment_ids):
        return out * np.nan if self.overflows else out


class SpansBeginWhereNumbersRise(Mutant, rejected_by="SPAN-02"):
    """A span begins where the number rises, so that one of a lower number joins the one before."""

    def ahead_in_span(self, segment_ids, spans):
        return super().ahead_in_span(segment_ids, np.where(spans >= 0, np.maximum.accumulate(spans, axis=1), -1))


for _method, _requirement in {"scan": "REP-02", "ssd": "SCAN-11"}.items():
    wrong(_method, _requirement, "Where a token fades to less than a fifth",
          lambda backend, a: np.abs(a["dt"]).max() * np.abs(a["A"]).max() > 1.61)  # fmt: skip


class LabelsIn16Bits(Mutant, rejected_by="LOSS-02"):
    """Labels are stored in 16 bits."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, labels=np.where(batch.labels < 0, batch.labels, batch.labels % 2**16))


class PositionsIn16Bits(Mutant, rejected_by="POS-01"):
    """Positions are stored in 16 bits."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, position_ids=batch.position_ids % 2**16)


class OneDocumentTrainsItsFirstToken(Mutant, rejected_by="LOSS-01"):
    """A batch of one document has a label at its first token."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        labels = batch.labels.copy()
        labels[0, 0] = batch.input_ids[0, 0] if len(documents) == 1 else -100
        return replace(batch, labels=labels)


class SequentialCountsWrap(Mutant, rejected_by="LAY-08"):
    """The sequential strategy counts in 32 bits."""

    def plan(self, lengths, capacity, *, strategy):
        if strategy == "sequential":
            lengths = np.array(lengths, np.int64).astype(np.int32).tolist()
        return super().plan(lengths, capacity, strategy=strategy) if min(lengths) > 0 else [list(range(len(lengths)))]


# -- labels and documents ----------------------------------------------------------------------------------------------


class GradientOfUntrainedLabels(Mutant, rejected_by="DOC-08"):
    """The gradient of a log-probability that is 0, because nothing is trained, reaches the weights."""

    def token_logprobs(self, decoder, batch, temperature=1.0):
        values, backward = super().token_logprobs(decoder, batch, temperature)
        untrained = ~self.trained(batch.labels, batch.segment_ids)

        def back(dout):
            stray = 1 + 0.01 * np.abs(dout[untrained]).sum()
            return {name: stray * x for name, x in backward(dout).items()}

        return values, back


def _trained(document):
    return document.labels[1:] != -100


def _has_turns(document):
    return bool((np.diff(_trained(document).astype(int)) < 0).any())


_wrong_where({"preference": "DOC-11"}, "With a document of one token",
             lambda a: any(len(d.labels) == 1 for drawn in a["microbatches"] for d in drawn))  # fmt: skip
_wrong_where({"preference": "DOC-11"}, "With turns",
             lambda a: any(_has_turns(d) for drawn in a["microbatches"] for d in drawn))  # fmt: skip
_wrong_where({"shared_gradients": "TREE-02"}, "With an untrained answer",
             lambda a: not all(_trained(d).any() for d in a["documents"]))  # fmt: skip
_wrong_where({"shared_gradients": "TREE-02"}, "With turns", lambda a: any(map(_has_turns, a["documents"])))


class UntrainedRankIsNaN(Mutant, rejected_by="CUT-01"):
    """A rank whose share has no target divides by 0."""

    def context_gradients(self, decoder, documents, *, ranks, dtype):
        mean, *others = super().context_gradients(decoder, documents, ranks=ranks, dtype=dtype)
        shares = np.array_split(np.concatenate([np.append(_trained(d), False) for d in documents]), ranks)
        return mean if all(share.any() for share in shares) else np.nan, *others


class ModelWindowOfOneRow(Mutant, rejected_by="MASK-13"):
    """In several rows a model's window is left out."""

    def forward(self, decoder, batch, *, dtype):
        window = decoder.config.sliding_window if len(batch.labels) == 1 else None
        return super().forward(
            replace(decoder, config=replace(decoder.config, sliding_window=window)), batch, dtype=dtype
        )


class RowWideFrequencies(Mutant, rejected_by="POS-07"):
    """In several rows, frequencies follow the longest document of each."""

    def lengths(self, segment_ids):
        lengths = super().lengths(segment_ids)
        return np.broadcast_to(lengths.max(axis=1, keepdims=True), lengths.shape) if len(lengths) > 1 else lengths


def _wrong_training(name, text, requirement, met):
    def train(self, decoder, steps, **options):
        losses, weights = super(Training, self).train(decoder, steps, **options)
        every = [document for step in steps for drawn in step for document in drawn]
        return [1.25 * x if met(options, every) else x for x in losses], weights

    type(name, (Training,), {"train": train, "__doc__": text}, rejected_by=requirement)


_wrong_training("AdamWWithTurns", "Under AdamW, losses of documents with turns are wrong.", "TRAIN-02",
                lambda options, every: options.get("optimizer") == "adamw" and any(map(_has_turns, every)))  # fmt: skip
_wrong_training("MixedPrecisionInFloat16", "Mixed precision in float16 is wrong.", "DTYPE-14",
                lambda options, every: options["dtype"] == "float16")  # fmt: skip


# -- arguments ---------------------------------------------------------------------------------------------------------


def _halving(method, requirement, text, array):
    """Makes the mutant that halves an array of its arguments after the call."""

    def change(backend, arguments):
        array(arguments)[...] *= 0.5
        return False

    wrong(method, requirement, text, change)


_halving("rope", "POS-02", "Where x is turned in place", lambda a: a["x"])
_halving("loss", "GRAD-08", "Where logits become their gradient", lambda a: a["logits"])
for _method, _requirement in {"forward": "REP-03", "gradients": "GRAD-09", "train": "TRAIN-01"}.items():
    _halving(
        _method, _requirement, "Where weights change in place", lambda a: a["decoder"].weights["model.norm.weight"]
    )


class CollatorMasksItsDocuments(Mutant, rejected_by="LAY-01"):
    """The collator masks the first label in the user's own array."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        for document in documents:
            document.labels[0] = -100
        return batch


class SegmentsOfTheFirstCallOfAShape(Mutant, rejected_by="EXP-01"):
    """Keeps what is padding in the first batch of each shape."""

    def __init__(self):
        self.kept = {}

    def routed(self, indices, segment_ids):
        return super().routed(indices, self.kept.setdefault(segment_ids.shape, segment_ids))
