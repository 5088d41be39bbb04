"""Numbers per document that count the wrong tokens, or count pairs unequally."""

from __future__ import annotations

import numpy as np

from tests.conformance.mutants.base import Mutant
from tests.conformance.mutants.model import one_segment


class MeanOverRows(Mutant, rejected_by="DOC-01"):
    """A mean divides by the tokens of the row, not by those of the document."""

    def shares(self, counted, order, how):
        share = super().shares(counted, order, how)
        if how != "mean":
            return share
        tokens = (share != 0).sum(axis=1, keepdims=True)
        return share * tokens / np.maximum(1, (share != 0).sum())


class LastTokenFromPadding(Mutant, rejected_by="DOC-02"):
    """The last token of a document is that of its row, padding or not."""

    def reading_order(self, pieces, shape):
        order = super().reading_order(pieces, shape)
        row, _, stop = pieces[-1]
        order[row, stop:] = np.where(
            order[row, stop:] < 0, order.max() + 1 + np.arange(shape[1] - stop), order[row, stop:]
        )
        return order


class OnlyTheFirstPiece(Mutant, rejected_by="DOC-03"):
    """Forgets what a document has in other rows."""

    def reading_order(self, pieces, shape):
        return super().reading_order(pieces[:1], shape)


class PiecesInOrderOfRows(Mutant, rejected_by="DOC-03"):
    """The pieces of a document are read in the order of their rows."""

    def reading_order(self, pieces, shape):
        return super().reading_order(sorted(pieces), shape)


class MeanCountsWhatIsLeftOut(Mutant, rejected_by="DOC-04"):
    """A mean divides by all tokens of the document, those left out included."""

    def shares(self, counted, order, how):
        share = super().shares(counted, order, how)
        if how != "mean":
            return share
        return share * counted.sum(axis=1, keepdims=True) / np.maximum(1, (order >= 0).sum(axis=1, keepdims=True))


class SiblingCounted(Mutant, rejected_by="DOC-05"):
    """The first token of the next document in the row counts as well."""

    def reading_order(self, pieces, shape):
        row, start, stop = pieces[-1]
        return super().reading_order([*pieces[:-1], (row, start, min(stop + 1, shape[1]))], shape)


class GradientOfTheSum(Mutant, rejected_by="DOC-06"):
    """The gradient of a mean is that of the sum."""

    def reduce(self, values, documents, **keywords):
        out, found = super().reduce(values, documents, **keywords)
        summed = super().reduce(values, documents, **{**keywords, "how": "sum"})[1]
        return out, summed if keywords["how"] == "mean" else found


class LogprobsWhereTheyArePredicted(Mutant, rejected_by="DOC-07"):
    """Log-probabilities stand at the token that predicts the label."""

    def logprobs(self, *args, **kwargs):
        found, gradients = super().logprobs(*args, **kwargs)
        return np.roll(found, -1, axis=1), gradients


class GradientOfTheLoss(Mutant, rejected_by="DOC-08"):
    """The gradient has the sign of a loss."""

    def logprobs(self, *args, **kwargs):
        found, gradients = super().logprobs(*args, **kwargs)
        return found, {name: -x for name, x in gradients.items()}


class TemperatureTwice(Mutant, rejected_by="DOC-09"):
    """The temperature divides the logits in the model and again in the loss."""

    def token_logprobs(self, decoder, batch, temperature=1.0):
        return super().token_logprobs(decoder, batch, temperature**2)


class LogprobsOfOneDocument(Mutant, rejected_by="DOC-10"):
    """A row is read as one document, of which the boundaries are no targets."""

    def logprobs(self, decoder, batch, **keywords):
        return super().logprobs(decoder, one_segment(batch), **keywords)


class PairsWeighedByMicrobatch(Mutant, rejected_by="DOC-11"):
    """A step is the mean of its microbatches' means, so a pair of a small one weighs more."""

    def share_of_pair(self, counts, number):
        return 1 / (len(counts) * counts[number])


class PooledOfOneDocument(Mutant, rejected_by="DOC-12"):
    """The encoder reads a row as one document, and is pooled document by document."""

    def visible(self, segment_ids, causal, window):
        return super().visible(1 * (segment_ids > 0), causal, window)


class LastTokenPooledEarly(Mutant, rejected_by="DOC-12"):
    """The last token is the one before it: the end token was not counted."""

    def shares(self, counted, order, how):
        share = super().shares(counted, order, how)
        ends = counted.sum(axis=1, keepdims=True) == 1
        return np.where(ends, share, np.roll(share, -1, axis=1)) if how == "last" else share


class PooledInReverse(Mutant, rejected_by="DOC-12"):
    """Vectors come back in another order than that of the documents."""

    def embed(self, decoder, documents, **keywords):
        vectors, found = super().embed(decoder, documents, **keywords)
        return vectors[::-1], found


class PooledWithoutGradientOfOne(Mutant, rejected_by="DOC-13"):
    """The first document's vector has no gradient."""

    def embed(self, decoder, documents, *, dout=None, **keywords):
        if dout is not None:
            dout = dout * (np.arange(len(dout)) > 0)[:, None]
        return super().embed(decoder, documents, dout=dout, **keywords)


class CentredVectors(Mutant, rejected_by="DOC-14"):
    """The mean over the batch is taken off each vector."""

    def embed(self, decoder, documents, **keywords):
        vectors, found = super().embed(decoder, documents, **keywords)
        return vectors - vectors.mean(axis=0), found
