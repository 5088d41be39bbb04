"""The reference backend's shared prefixes: a forest of tokens in one row, in dense numpy.

Documents -> one token for each different beginning that no target is in, and the rest of every document -> the suite's
decoder with a mask of ancestors -> pairs of a token and the label that it predicts. Each rule that a mutant breaks is a
method of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from conformance import decoder as numpy_decoder
from conformance.draws import round_to
from packing_core import reference
from packing_core.protocol import Array, Backend, Decoder, DecoderConfig, Document, Gradients


@dataclass(frozen=True)
class Tree:
    """A forest of T tokens.

    Attributes:
        input_ids: int64 ``[T]``.
        parents: int64 ``[T]``, the token before each one in its documents; -1 for a first one.
        labels: int64 ``[T]``, -100 where nothing is trained.
        owners: int64 ``[T]``, the document of a token; -1 where several share it.
    """

    input_ids: Array
    parents: Array
    labels: Array
    owners: Array


class TreeMethods(Backend):
    """`shared_gradients` of a backend that runs the suite's decoder."""

    def shared_gradients(
        self, decoder: Decoder, documents: Sequence[Document], *, dtype: str
    ) -> tuple[float, Gradients, int]:
        tree = self.tree(documents)
        logits, backward = numpy_decoder.run(decoder, tree.input_ids, self._mixing(tree, decoder.config))
        places, targets = self.pairs(tree)
        loss, weight = reference.cross_entropy(logits[places], targets)
        found = reference.cross_entropy_vjp(logits[places], targets)["logits"]
        dlogits = np.zeros_like(logits)
        np.add.at(dlogits, places, found / max(weight, 1.0))
        gradients = {name: round_to(dtype, gradient) for name, gradient in backward(dlogits).items()}
        return loss / max(weight, 1.0), gradients, len(tree.input_ids)

    def tree(self, documents: Sequence[Document]) -> Tree:
        """The documents' tokens, those of a common beginning once."""
        numbers: dict[tuple[int, ...], int] = {}
        rows: list[tuple[int, int, int, int]] = []
        for owner, document in enumerate(documents):
            ids = document.input_ids.tolist()
            trained = np.flatnonzero(document.labels[1:] != -100) + 1
            shared = min(int(trained[0]) if len(trained) else len(ids), len(ids) - 1)
            before = -1
            for n, (token, label) in enumerate(zip(ids, document.labels.tolist(), strict=True)):
                key = tuple(ids[: n + 1]) if n < shared else (-1 - owner, n)
                if key not in numbers:
                    numbers[key] = len(rows)
                    rows.append((token, before, label if n >= shared else -100, owner if n >= shared else -1))
                before = numbers[key]
        return Tree(*np.array(rows, np.int64).T)

    def ancestors(self, tree: Tree) -> Array:
        """bool ``[T, T]``: the tokens that each one sees, itself and those on its path."""
        seen = np.eye(len(tree.parents), dtype=bool)
        for token, before in enumerate(tree.parents.tolist()):
            if before >= 0:
                seen[token] |= seen[before]
        return seen

    def tree_positions(self, tree: Tree) -> Array:
        """int ``[T]``: each token's position in its documents."""
        positions: Array = self.ancestors(tree).sum(axis=1) - 1
        return positions

    def pairs(self, tree: Tree) -> tuple[Array, Array]:
        """Returns the tokens that predict, and the label that each predicts."""
        trained = np.flatnonzero((tree.labels != -100) & (tree.parents >= 0))
        return tree.parents[trained], tree.labels[trained]

    def credited(self, tree: Tree) -> Array:
        """bool ``[T, T]``: from which queries each key's gradient comes."""
        return self.ancestors(tree)

    def _mixing(self, tree: Tree, config: DecoderConfig) -> MaskedMixing:
        where = self.tree_positions(tree), numpy_decoder.inv_freq(config, len(tree.input_ids))
        return MaskedMixing(self.ancestors(tree), self.credited(tree), where)


class MaskedMixing(numpy_decoder.Mixing):
    """The decoder's mixing operations with a mask.

    Args:
        seen: bool ``[T, T]``, the tokens that each one sees.
        credited: bool ``[T, T]``, from which queries each key's gradient comes.
        where: positions ``[T]`` and rotary frequencies.
    """

    def __init__(self, seen: Array, credited: Array, where: tuple[Array, Array]) -> None:
        self._seen, self._credited, self._where = seen, credited, where

    def rope(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        return reference.rope(x, *self._where), lambda dout: reference.rope_vjp(x, *self._where, dout)["x"]

    def attention(self, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        q_, k_, v_ = (np.moveaxis(x, 1, 0) for x in (q, k.repeat(group, 1), v.repeat(group, 1)))  # [H, T, D]
        z = np.where(self._seen, q_ @ k_.swapaxes(1, 2) * scale, -np.inf)
        weight = np.exp(z - z.max(axis=-1, keepdims=True))
        p = weight / weight.sum(axis=-1, keepdims=True)

        def back(dout: Array) -> tuple[Array, Array, Array]:
            dout_ = np.moveaxis(dout, 1, 0)
            dp = dout_ @ v_.swapaxes(1, 2)
            dz = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
            to_keys, to_values = (np.where(self._credited, x, 0.0).swapaxes(1, 2) for x in (dz, p))
            found = dz @ k_, to_keys @ q_, to_values @ dout_
            dq, dk, dv = (np.moveaxis(x, 0, 1) for x in found)
            return dq, *(x.reshape(len(x), -1, group, x.shape[2]).sum(axis=2) for x in (dk, dv))

        return np.moveaxis(p @ v_, 0, 1), back
