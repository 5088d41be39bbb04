"""Backends that are right at the usual call of a method, and wrong at another one.

Without an output gradient, in narrow dtypes, at the same call again, beside a row of padding, under a sliding window,
and where options of the trainer meet.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np

from packing_core.protocol import Backend, Batch
from tests.conformance.mutants.base import Mutant
from tests.conformance.mutants.trainer import Training


def wrong(method, requirement, text, where, change=lambda result: (result[0] * 1.25, *result[1:])):
    """Makes the mutant whose result of a method is changed where ``where(backend, arguments)`` is true."""
    name = "".join(part.capitalize() for part in f"{method}_{text.split(',')[0]}".replace(" ", "_").split("_"))

    def call(self, *args, **kwargs):
        arguments = inspect.signature(getattr(Backend, method)).bind(self, *args, **kwargs).arguments
        result = getattr(Mutant, method)(self, *args, **kwargs)
        return change(result) if where(self, arguments) else result

    return type(name, (Mutant,), {method: call, "__doc__": f"{text}, {method} is wrong."}, rejected_by=requirement)


# -- without an output gradient ----------------------------------------------------------------------------------------

for _method, _requirement in {
    "attention": "PAD-01",
    "rope": "POS-02",
    "scan": "PAD-05",
    "delta_rule": "SCAN-01",
    "ssd": "SCAN-11",
    "convolution": "SCAN-17",
    "experts": "EXP-01",
    "clips": "CLIP-01",
    "index_loss": "SPARSE-06",
    "reduce": "DOC-01",
    "logprobs": "DOC-07",
    "embed": "DOC-12",
}.items():
    wrong(_method, _requirement, "Without an output gradient", lambda backend, given: given.get("dout") is None)


# -- narrow dtypes -----------------------------------------------------------------------------------------------------


def _in_float16(option):
    """Returns whether a call with an option is in float16, as a function of the backend and the arguments."""
    return lambda backend, given: given["dtype"] == "float16" and option(given)


for _method, _requirement in {
    "convolution": "SCAN-19",
    "clips": "CLIP-04",
    "index_loss": "SPARSE-07",
    "reduce": "DOC-15",
    "logprobs": "DOC-16",
    "preference": "DOC-17",
    "embed": "DOC-18",
    "shared_gradients": "TREE-06",
    "context_gradients": "CUT-03",
}.items():
    wrong(_method, _requirement, "In float16", _in_float16(lambda given: True))

for _method, _requirement, _option, _takes in (
    ("attention", "DTYPE-02", "sinks", lambda given: given.get("sinks") is not None),
    ("attention", "DTYPE-02", "a window", lambda given: given.get("window") is not None),
    ("attention", "DTYPE-02", "spans", lambda given: given.get("spans") is not None),
    ("rope", "DTYPE-05", "pairs of neighbours", lambda given: given.get("interleaved", False)),
    ("delta_rule", "SCAN-10", "normalisation", lambda given: given.get("normalise", False)),
    ("ssd", "SCAN-16", "parents", lambda given: given.get("parents") is not None),
    ("convolution", "SCAN-19", "parents", lambda given: given.get("parents") is not None),
    ("experts", "EXP-08", "biases", lambda given: given.get("up_bias") is not None),
):
    wrong(_method, _requirement, f"In float16 with {_option}", _in_float16(_takes))


class LossGradientHalvedInBfloat16(Mutant, rejected_by="DTYPE-07"):
    """In bfloat16 the sum of the loss is right, and its gradient is half of what it should be."""

    def loss(self, *args, dtype, **kwargs):
        total, weight, gradient = super().loss(*args, dtype=dtype, **kwargs)
        return total, weight, gradient * (0.5 if dtype == "bfloat16" else 1.0)


class LossGradientALittleTooLarge(Mutant, rejected_by="GRAD-08"):
    """The gradient of the logits is too large by one part in ten thousand."""

    def loss(self, *args, **kwargs):
        total, weight, gradient = super().loss(*args, **kwargs)
        return total, weight, gradient * 1.0001


# -- the same call again -----------------------------------------------------------------------------------------------


def _again(backend, given):
    """Remembers the tokens of a call; true if they came before."""
    seen, key = backend.__dict__.setdefault("seen", set()), repr(_tokens(given))
    came = key in seen
    seen.add(key)
    return came


def _tokens(x):
    if isinstance(x, dict):
        return [_tokens(value) for name, value in x.items() if name not in ("self", "decoder")]
    if isinstance(x, list | tuple):
        return [_tokens(value) for value in x]
    if isinstance(x, np.ndarray):
        return x.shape, x.tobytes()
    return _tokens([x.input_ids, x.labels]) if hasattr(x, "input_ids") else x


for _method, _requirement in {
    "logprobs": "DET-06",
    "embed": "DET-07",
    "preference": "DET-08",
    "shared_gradients": "DET-09",
    "context_gradients": "DET-10",
    "index_loss": "SPARSE-06",
}.items():
    wrong(_method, _requirement, "At the same call again", _again)


# -- a row of padding --------------------------------------------------------------------------------------------------


def _has_empty_row(backend, given):
    ids = given["batch"].segment_ids if "batch" in given else given["segment_ids"]
    return bool((ids == 0).all(axis=1).any())


for _method, _requirement in {
    "scan": "SHAPE-09",
    "delta_rule": "SCAN-01",
    "ssd": "SCAN-11",
    "convolution": "SCAN-17",
    "experts": "EXP-01",
    "loss": "PAD-06",
    "gradients": "REP-05",
}.items():
    wrong(_method, _requirement, "Beside a row of padding", _has_empty_row)

wrong("forward", "REP-04", "Beside a row of padding", _has_empty_row, lambda logits: logits * np.nan)


class ReductionsBesideARowOfPadding(Mutant, rejected_by="DOC-02"):
    """Beside a row of padding, the mean of a document is 0 / 0."""

    def shares_of(self, documents, shape, how, where=None):
        share = super().shares_of(documents, shape, how, where)
        empty = (share.sum(axis=0).reshape(shape) == 0).all(axis=1).any()
        return share * np.nan if how == "mean" and empty else share


# -- a sliding window, frequencies of the document ---------------------------------------------------------------------

for _method, _requirement in {
    "gradients": "MASK-16",
    "logprobs": "MASK-17",
    "embed": "MASK-18",
    "train": "MASK-19",
    "preference": "MASK-20",
}.items():

    def _whole(self, decoder, *args, _method=_method, **kwargs):
        config = replace(decoder.config, sliding_window=None)
        return getattr(Mutant, _method)(self, replace(decoder, config=config), *args, **kwargs)

    _text = f"A sliding window is left out of {_method}."
    type(f"WindowLeftOutOf_{_method}", (Mutant,), {_method: _whole, "__doc__": _text}, rejected_by=_requirement)


class GradientsAtBatchWideFrequencies(Mutant, rejected_by="POS-08"):
    """Logits have the rotary frequencies of each document, and gradients those of the longest one."""

    takes_gradients = False

    def gradients(self, *args, **kwargs):
        self.takes_gradients = True
        try:
            return super().gradients(*args, **kwargs)
        finally:
            self.takes_gradients = False

    def lengths(self, segment_ids):
        lengths = super().lengths(segment_ids)
        return np.full_like(lengths, lengths.max()) if self.takes_gradients else lengths


# -- options of the trainer --------------------------------------------------------------------------------------------


class AdamWOverRanksTakesTheFirst(Training, rejected_by="TRAIN-06"):
    """Under AdamW the microbatches of the first rank alone count."""

    def train(self, decoder, steps, *, ranks=1, **kwargs):
        if ranks > 1 and kwargs["optimizer"] == "adamw":
            steps = [step[::ranks] for step in steps]
        return super().train(decoder, steps, ranks=ranks, **kwargs)


class MixedPrecisionOverRanksTakesTheFirst(Training, rejected_by="TRAIN-06"):
    """In mixed precision the microbatches of the first rank alone count."""

    def train(self, decoder, steps, *, ranks=1, **kwargs):
        if ranks > 1 and kwargs["dtype"] != "float32":
            steps = [step[::ranks] for step in steps]
        return super().train(decoder, steps, ranks=ranks, **kwargs)


class AdamWInMixedPrecisionTooFast(Training, rejected_by="TRAIN-06"):
    """In mixed precision, AdamW's steps are a quarter too long."""

    def train(self, decoder, steps, *, learning_rate, **kwargs):
        if kwargs["dtype"] != "float32" and kwargs["optimizer"] == "adamw":
            learning_rate *= 1.25
        return super().train(decoder, steps, learning_rate=learning_rate, **kwargs)


class OneTokenMicrobatchIsNaN(Training, rejected_by="LOSS-08"):
    """A microbatch of one-token documents is divided by no tokens."""

    def train(self, decoder, steps, **kwargs):
        losses, weights = super().train(decoder, steps, **kwargs)
        nothing = [any(all(len(d.input_ids) == 1 for d in microbatch) for microbatch in step) for step in steps]
        return list(np.where(nothing, np.nan, losses)), weights


class RanksTakeTheFirstRow(Training, rejected_by="LOSS-09"):
    """Over ranks, the first row of a microbatch alone counts."""

    over_ranks = False

    def train(self, decoder, steps, *, ranks=1, **kwargs):
        self.over_ranks = ranks > 1
        return super().train(decoder, steps, ranks=ranks, **kwargs)

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        if not self.over_ranks:
            return batch
        return Batch(*(x[:1] for x in (batch.input_ids, batch.segment_ids, batch.position_ids, batch.labels)))


class EqualDocumentsPooledOnce(Mutant, rejected_by="DOC-12"):
    """The first of equal documents alone has a vector."""

    def embed(self, decoder, documents, **keywords):
        vectors, gradients = super().embed(decoder, documents, **keywords)
        tokens = [document.input_ids.tobytes() for document in documents]
        return vectors * [[tokens.index(ids) == number] for number, ids in enumerate(tokens)], gradients
