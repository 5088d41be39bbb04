"""The reference backend's context parallelism: documents cut over ranks, all of which are in this process, in numpy.

Documents -> equal shares of neighbouring tokens, one for each rank -> the suite's decoder with a mask of what each
token sees on its own rank and fetches from others -> sums over the ranks. Each rule that a mutant breaks is a method of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance import decoder as numpy_decoder
from conformance.draws import round_to
from conformance.reference_trees import MaskedMixing
from packing_core import reference
from packing_core.protocol import Array, Backend, Decoder, Document, Gradients


@dataclass(frozen=True)
class Cut:
    """The T tokens of all documents.

    Attributes:
        documents: int64 ``[T]``, the document of each.
        positions: int64 ``[T]``, its position in that document.
        ranks: int64 ``[T]``, the rank that holds it, ascending.
        targets: int64 ``[T]``, the label that it predicts, -100 for none.
    """

    documents: Array
    positions: Array
    ranks: Array
    targets: Array


class CutMethods(Backend):
    """`context_gradients` of a backend that runs the suite's decoder."""

    def context_gradients(
        self, decoder: Decoder, documents: Sequence[Document], *, ranks: int, dtype: str
    ) -> tuple[float, Gradients, list[int]]:
        lengths = [len(document.input_ids) for document in documents]
        cut = Cut(
            np.repeat(np.arange(len(lengths)), lengths),
            np.concatenate([np.arange(n) for n in lengths]),
            np.arange(sum(lengths)) * ranks // sum(lengths),
            np.concatenate([np.append(document.labels[1:], -100) for document in documents]),
        )
        seen = self.seen_over_ranks(cut, decoder.config.sliding_window)
        where = self.context_positions(cut), numpy_decoder.inv_freq(decoder.config, max(lengths))
        input_ids = np.concatenate([document.input_ids for document in documents])
        logits, backward = numpy_decoder.run(decoder, input_ids, MaskedMixing(seen, self.returned(cut, seen), where))
        places = np.flatnonzero(self.predicting(cut))
        each = np.array([reference.cross_entropy(logits[p : p + 1], cut.targets[p : p + 1])[0] for p in places])
        divisors = self.divisors(cut, places)
        dlogits = np.zeros_like(logits)
        dlogits[places] = reference.cross_entropy_vjp(logits[places], cut.targets[places])["logits"] / divisors[:, None]
        gradients = {name: round_to(dtype, gradient) for name, gradient in backward(dlogits).items()}
        return float((each / divisors).sum()), gradients, self.held(cut, ranks)

    def seen_over_ranks(self, cut: Cut, window: int | None) -> Array:
        """bool ``[T, T]``: the tokens that each one sees, on its own rank and on others."""
        place = np.arange(len(cut.ranks))
        back = place[:, None] - place
        return (cut.documents[:, None] == cut.documents) & (back >= 0) & (back < (window or len(place)))

    def returned(self, cut: Cut, seen: Array) -> Array:
        """bool ``[T, T]``: from which queries each key's gradient comes."""
        return seen

    def context_positions(self, cut: Cut) -> Array:
        """int64 ``[T]``: each token's position, from which it is turned."""
        return cut.positions

    def predicting(self, cut: Cut) -> Array:
        """bool ``[T]``: the tokens that predict a trained label."""
        return cut.targets != -100

    def divisors(self, cut: Cut, places: Array) -> Array:
        """float ``[n]``: by what the loss of each trained label is divided."""
        return np.full(len(places), max(len(places), 1), np.float64)

    def held(self, cut: Cut, ranks: int) -> list[int]:
        """The tokens that each rank computes."""
        return [int(n) for n in np.bincount(cut.ranks, minlength=ranks)]
