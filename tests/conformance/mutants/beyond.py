"""Backends that are right up to a limit and wrong beyond it; `sizes` has their table with cases and constants."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import replace
from typing import ClassVar

import numpy as np

from packing_core.protocol import Backend, Document, position_ids, segments
from tests.conformance.mutants.base import Mutant


class Sized(Mutant):
    """Right up to ``limit``."""

    limit: ClassVar[float]


def beyond(method, what, result="out"):
    """Returns a kind whose output, or the gradient of one argument, is 0 beyond the limit."""

    def call(self, *args, **kwargs):
        out, gradients = getattr(Mutant, method)(self, *args, **kwargs)
        given = inspect.signature(getattr(Backend, method)).bind(self, *args, **kwargs).arguments
        results = {"out": out, **gradients}
        if result in results:
            results[result][_PLACES[what](given, self.limit)] = 0.0
        return out, gradients

    doc = f"Beyond so many {what}, the {'output' if result == 'out' else f'gradient of {result}'} of {method} is 0."
    return type(f"{method}_{what}_{result}", (Sized,), {method: call, "__doc__": doc})


_PLACES = {
    "tokens": lambda given, n: (
        (given["position_ids"] if "position_ids" in given else position_ids(given["segment_ids"])) >= n
    ),
    "documents": lambda given, n: given["segment_ids"] > n,
    "rows": lambda given, n: np.s_[n:],
    "heads": lambda given, n: np.s_[:, :, n:],
    "widths": lambda given, n: np.s_[:, :, :, n:],
}


def changing(name, text, change, **arguments):
    """Returns a kind that changes an argument of some methods by ``change(argument, limit)``."""

    def override(method, argument):
        def call(self, *args, **kwargs):
            given = inspect.signature(getattr(Backend, method)).bind(self, *args, **kwargs)
            if given.arguments.get(argument) is not None:
                given.arguments[argument] = change(given.arguments[argument], self.limit)
            return getattr(Mutant, method)(*given.args, **given.kwargs)

        return call

    methods = {method: override(method, argument) for method, argument in arguments.items()}
    return type(name, (Sized,), {"__doc__": text, **methods})


def _cut(documents, n):
    return [Document(d.input_ids[:n], d.labels[:n]) for d in documents]


def _prompted(documents, n):
    return [Document(d.input_ids, np.where(np.arange(len(d.labels)) < n, -100, d.labels)) for d in documents]


def _merged(documents, n):
    keys = [document.input_ids.tobytes() for document in documents]
    return [d for number, d in enumerate(documents) if keys[:number].count(keys[number]) < n]


def _merged_pairs(microbatches, n):
    seen, kept = defaultdict(int), []
    for chosen, rejected, number in _pairs(microbatches):
        key = chosen.input_ids.tobytes(), rejected.input_ids.tobytes()
        seen[key] += 1
        kept += [(number, chosen, rejected)] if seen[key] <= n else []
    return _batched(kept)


def _different(microbatches, n):
    return _batched((i, a, b) for a, b, i in _pairs(microbatches) if not np.array_equal(a.input_ids, b.input_ids))


def _pairs(microbatches):
    return [(*pair, i) for i, drawn in enumerate(microbatches) for pair in zip(drawn[::2], drawn[1::2], strict=True)]


def _batched(pairs):
    found = defaultdict(list)
    for number, chosen, rejected in pairs:
        found[number] += [chosen, rejected]
    return list(found.values())


PooledDocumentsCut = changing("PooledDocumentsCut", "Documents are pooled up to the limit.", _cut, embed="documents")
ChoicesOfFewKeys = changing("ChoicesOfFewKeys", "At most so many keys are chosen.", min, index_loss="top_k")
SinksLimited = changing(
    "SinksLimited", "Heads beyond the limit have no sink.",
    lambda x, n: np.where(np.arange(len(x)) < n, x, -1e30), attention="sinks",
)  # fmt: skip
SlopesLimited = changing(
    "SlopesLimited", "Heads beyond the limit have the slope of the last one before.",
    lambda x, n: x[np.minimum(np.arange(len(x)), n - 1)], attention="alibi_slopes",
)  # fmt: skip
BetaClipped = changing(
    "BetaClipped", "beta is at most the limit, in preference losses too.", np.minimum,
    delta_rule="beta", preference="beta",
)  # fmt: skip
StatesLimited = changing(
    "StatesLimited", "States, or channels of a key, beyond the limit are not read.",
    lambda x, n: np.where(np.arange(x.shape[-1]) < n, x, 0.0), scan="C", ssd="C", delta_rule="q",
)  # fmt: skip
OneConvolutionWrong = changing(
    "OneConvolutionWrong", "At the width that is the limit, the first weight is not applied.",
    lambda x, n: np.where((np.arange(x.shape[1]) > 0) | (x.shape[1] != n), x, 0.0), convolution="weight",
)  # fmt: skip
InnerWidthLimited = changing(
    "InnerWidthLimited", "Inner channels beyond the limit are not brought back down.",
    lambda x, n: np.where(np.arange(x.shape[2]) < n, x, 0.0), experts="down",
)  # fmt: skip
WeightsBelowZeroAreNone = changing(
    "WeightsBelowZeroAreNone",
    "Smaller weights count as none.",
    lambda x, n: np.where(x < n, 0, x),
    loss="token_weights",
)
ZerosWeighOne = changing(
    "ZerosWeighOne",
    "A weight of the limit, 0, counts as one.",
    lambda x, n: np.where(x == n, 1, x),
    loss="token_weights",
)
ExpertsNotRun = changing(
    "ExpertsNotRun", "Experts beyond the limit are not run.", lambda x, n: np.where(x < n, x, -1), experts="indices"
)
ChoicesLimited = changing(
    "ChoicesLimited", "Choices beyond the limit are not followed.",
    lambda x, n: np.where(np.arange(x.shape[2]) < n, x, -1), experts="indices",
)  # fmt: skip
CollatorCuts = changing("CollatorCuts", "Documents are cut after so many tokens.", _cut, collate="documents")
EqualDocumentsMerged = changing(
    "EqualDocumentsMerged", "Of equal documents so many are packed, or trained as answers.", _merged,
    collate="documents", shared_gradients="documents",
)  # fmt: skip
AnswersLost = changing(
    "AnswersLost", "Answers beyond the limit are not trained.", lambda x, n: x[:n], shared_gradients="documents"
)
SharedTargetsLost = changing(
    "SharedTargetsLost", "A document's first so many tokens are a prompt.", _prompted, shared_gradients="documents"
)
TrainsFewMicrobatches = changing(
    "TrainsFewMicrobatches", "A step takes so many microbatches.", lambda x, n: [step[:n] for step in x], train="steps"
)
PairsOfFewMicrobatches = changing(
    "PairsOfFewMicrobatches", "A step takes so many of pairs.", lambda x, n: x[:n], preference="microbatches"
)
PairsDropped = changing(
    "PairsDropped", "A microbatch holds so many pairs.",
    lambda x, n: [drawn[: 2 * n] for drawn in x], preference="microbatches",
)  # fmt: skip
EqualPairsMerged = changing(
    "EqualPairsMerged", "A step counts so many of equal pairs.", _merged_pairs, preference="microbatches"
)
EqualAnswersDropped = changing(
    "EqualAnswersDropped", "Pairs whose answers are equal are left out.", _different, preference="microbatches"
)

# -- attention -------------------------------------------------------------------------------------------------------


class WindowForgotten(Sized):
    """A window of so many tokens or more is none."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids, causal, self._kept(window))

    def seen_over_ranks(self, cut, window):
        return super().seen_over_ranks(cut, self._kept(window))

    def _kept(self, window):
        return window if window is None or window < self.limit else None


class HeadsMixed(Sized):
    """Heads beyond the limit take one another's values, in models too."""

    def weigh(self, p, v):
        out = super().weigh(p, v)
        out[:, self.limit :] = np.roll(out[:, self.limit :], 1, axis=1) if out.shape[1] > self.limit + 1 else 0
        return out


class SharedHeadsLimited(Sized):
    """Heads of keys, and groups of B and C, beyond the limit are taken for the last one before."""

    def kv_head(self, heads, kv_heads):
        return np.minimum(super().kv_head(heads, kv_heads), self.limit - 1)

    def group(self, heads, groups):
        return np.minimum(super().group(heads, groups), self.limit - 1)

    def key_head(self, heads, key_heads):
        return np.minimum(super().key_head(heads, key_heads), self.limit - 1)


class SpansLimited(Sized):
    """Spans reach so many tokens ahead, and so many spans have numbers of their own."""

    def ahead_in_span(self, segment_ids, spans):
        column = np.arange(segment_ids.shape[1])
        near = column - column[:, None] < self.limit
        return super().ahead_in_span(segment_ids, np.where(spans < self.limit, spans, -1)) & near


class RingTooShort(Sized):
    """A rank sees the keys of so many ranks, its own included."""

    ranks = 1

    def attention(self, *args, context_ranks=1, **kwargs):
        self.ranks = context_ranks
        return super().attention(*args, context_ranks=context_ranks, **kwargs)

    def visible(self, segment_ids, causal, window):
        rank = np.arange(segment_ids.shape[1]) * self.ranks // segment_ids.shape[1]
        return super().visible(segment_ids, causal, window) & (np.abs(rank[:, None] - rank) < self.limit)

    def seen_over_ranks(self, cut, window):
        return super().seen_over_ranks(cut, window) & (cut.ranks[:, None] - cut.ranks < self.limit)


class SegmentAtLimitSeesItsPredecessor(Sized):
    """A segment that starts at a multiple of the limit goes on from the one before."""

    def _joined(self, segment_ids):
        ids = segment_ids.copy()
        for row, start, stop in segments(segment_ids):
            if start and start % self.limit == 0:
                ids[row, start:stop] = ids[row, start - 1]
        return ids

    def visible(self, segment_ids, causal, window):
        return super().visible(self._joined(segment_ids), causal, window)

    def carries(self, segment_ids):
        return super().carries(self._joined(segment_ids))

    def goes_on(self, segment_ids):
        return super().goes_on(self._joined(segment_ids))


# -- scans -----------------------------------------------------------------------------------------------------------


class StatesLost(Sized):
    """The state is lost after every so many tokens of a segment."""

    def carries(self, segment_ids):
        return super().carries(segment_ids) & (position_ids(segment_ids) % self.limit != 0)

    def goes_on(self, segment_ids):
        return super().goes_on(segment_ids) & (position_ids(segment_ids) % self.limit != 0)


class GroupsOfScansSmall(Sized):
    """A group of B and C, or a head of q and k, serves so many heads at most, and none the others."""

    def ssd(self, *args, **kwargs):
        return self._served(super().ssd(*args, **kwargs), kwargs["B"])

    def delta_rule(self, *args, **kwargs):
        return self._served(super().delta_rule(*args, **kwargs), kwargs["k"])

    def _served(self, answer, shared):
        out, gradients = answer
        out[:, :, np.arange(out.shape[2]) % (out.shape[2] // shared.shape[2]) >= self.limit] = 0.0
        return out, gradients


class LevelsLimited(Sized):
    """Segments deeper than the limit start from zero."""

    def before(self, segment_ids, parents):
        if parents is not None:
            depth = np.zeros(len(parents), int)
            for segment, parent in enumerate(parents):
                depth[segment] = depth[parent] + 1 if parent >= 0 else 0
            parents = np.where(depth > self.limit, -1, parents)
        return super().before(segment_ids, parents)


class ChildrenLimited(Sized):
    """The first so many segments alone that go on from one start from its state."""

    def before(self, segment_ids, parents):
        if parents is not None:
            older = np.array([np.sum(parents[:segment] == parent) for segment, parent in enumerate(parents)])
            parents = np.where(older >= self.limit, -1, parents)
        return super().before(segment_ids, parents)


# -- experts ---------------------------------------------------------------------------------------------------------


class ExpertsDropTokens(Sized):
    """An expert drops what comes after so many tokens."""

    def routed(self, indices, segment_ids):
        followed = super().routed(indices, segment_ids).copy()
        for expert in range(followed.max() + 1):
            places = np.flatnonzero(followed.ravel() == expert)
            followed.ravel()[places[self.limit :]] = -1
        return followed


# -- losses ------------------------------------------------------------------------------------------------------------


class WordsWrap(Sized):
    """Labels and token ids wrap at the limit."""

    def _loss(self, logits, labels, *args):
        return super()._loss(logits, np.where(labels >= 0, labels % self.limit, labels), *args)

    def _decode(self, decoder, batch):
        return super()._decode(decoder, replace(batch, input_ids=batch.input_ids % self.limit))


class ChunksWithoutTheTail(Sized):
    """The loss is computed in chunks of so many tokens, and what does not fill one is left out."""

    def trained(self, labels, segment_ids):
        counts = super().trained(labels, segment_ids)
        whole = counts.size // self.limit * self.limit if counts.size > self.limit else counts.size
        counts.ravel()[whole:] = False
        return counts


class LabelsLimited(Sized):
    """Labels beyond so many tokens of a document, and in documents and rows beyond so many, do not count."""

    def trained(self, labels, segment_ids):
        counts = super().trained(labels, segment_ids)
        counts[self.limit :] = False
        return counts & (position_ids(segment_ids) < self.limit) & (segment_ids <= self.limit)


class ReductionsOfFewTokens(Sized):
    """Tokens beyond the limit do not count."""

    def reading_order(self, pieces, shape):
        order = super().reading_order(pieces, shape)
        return np.where(order < self.limit, order, -1)


class ReductionsOfFewPieces(Sized):
    """Pieces and rows beyond the limit do not count."""

    def reading_order(self, pieces, shape):
        order = super().reading_order(pieces[: self.limit], shape)
        order[self.limit :] = -1
        return order


# -- collators, models and trainers ----------------------------------------------------------------------------------


class PlansFewDocuments(Sized):
    """Documents beyond the limit get rows of their own."""

    def plan(self, lengths, capacity, *, strategy):
        rows = super().plan(lengths[: self.limit], capacity, strategy=strategy)
        return rows + [[number] for number in range(self.limit, len(lengths))]


class RowsOfACollator(Sized):
    """Rows beyond the limit are lost."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(
            batch, segment_ids=np.where(np.arange(len(batch.labels))[:, None] < self.limit, batch.segment_ids, 0)
        )


class ModelPositionsEnd(Sized):
    """The model's rotary table ends at the limit."""

    def _decode(self, decoder, batch):
        return super()._decode(decoder, replace(batch, position_ids=np.minimum(batch.position_ids, self.limit - 1)))


class ModelSegmentsEnd(Sized):
    """The model keeps so many segments of a row, the last of which holds all that follow."""

    def _decode(self, decoder, batch):
        return super()._decode(decoder, replace(batch, segment_ids=np.minimum(batch.segment_ids, self.limit)))


class LayersSkipped(Sized):
    """Layers beyond the limit are skipped."""

    def _decode(self, decoder, batch):
        layers = min(decoder.config.num_hidden_layers, self.limit)
        config = replace(decoder.config, num_hidden_layers=layers)
        return super()._decode(replace(decoder, config=config), batch)


class TreePositionsEnd(Sized):
    """A tree's rotary table ends at the limit."""

    def tree_positions(self, tree):
        return np.minimum(super().tree_positions(tree), self.limit - 1)


class LevelsOfATreeMerged(Sized):
    """A token sees the ancestors of so many branches."""

    def ancestors(self, tree):
        seen = super().ancestors(tree)
        children = np.bincount(tree.parents[tree.parents >= 0], minlength=len(tree.parents))
        depth = np.zeros(len(tree.parents), int)
        for token, before in enumerate(tree.parents.tolist()):
            depth[token] = depth[before] + (children[before] > 1) if before >= 0 else 0
        return seen & (depth[:, None] - depth < self.limit)


class CutDocumentsMerged(Sized):
    """Documents beyond the limit are one."""

    def seen_over_ranks(self, cut, window):
        return super().seen_over_ranks(replace(cut, documents=np.minimum(cut.documents, self.limit)), window)


class RanksLeftOut(Sized):
    """Ranks beyond the limit do not count."""

    def combine(self, by_rank):
        return super().combine(by_rank[: self.limit])
