"""The reference backend's selected keys: whole rows in dense numpy, the choice of keys and the loss of an indexer.

Each rule that a mutant breaks is a method of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packing_core.protocol import Array, Backend, Gradients, OperationCall, segments, takes_call


class SelectionMethods(Backend):
    """The choice of keys that an indexer scores, and `index_loss`."""

    def chosen(self, segment_ids: Array, seen: Array, scores: Array, top_k: int) -> Array:
        """bool ``[B, S, S]``: the keys of the largest scores among those that a query sees."""
        order = np.argsort(-np.where(seen, scores, -np.inf), axis=-1, kind="stable")
        best = np.zeros_like(seen)
        np.put_along_axis(best, order[..., :top_k], True, axis=-1)
        return best & seen

    def counted(self, segment_ids: Array) -> Sequence[tuple[int, int, int]]:
        """The row, first token and end of everything from whose beginning blocks of keys are counted."""
        return segments(segment_ids)

    def chosen_blocks(self, segment_ids: Array, seen: Array, index: Sequence[Array], top_k: int, size: int) -> Array:
        """bool ``[B, S, S]``: the keys of the best blocks that have ended, and those behind these."""
        q, k, weights = index
        best = np.zeros_like(seen)
        for row, start, stop in self.counted(segment_ids):
            blocks = np.arange(start, start + (stop - start) // size * size).reshape(-1, size)
            products = np.einsum("ihf,jf->ihj", q[row], k[row][blocks].mean(1), dtype=np.float64)
            scores = np.einsum("ih,ihj->ij", weights[row], np.maximum(products, 0))
            for query in range(start, stop):
                ended = (query - start + 1) // size
                best[row, query, blocks[np.argsort(-scores[query, :ended])[:top_k]]] = True
                best[row, query, start + ended * size : query + 1] = True
        return best & seen

    @takes_call("index_q", "index_k", "index_weights")
    def index_loss(self, call: OperationCall) -> tuple[Array, Gradients]:
        index_q, index_k, index_weights = (np.asarray(x, np.float64) for x in call.operands.values())
        ids, dout = call.segment_ids, call.dout
        seen = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[..., None] & np.tri(ids.shape[1], dtype=bool)
        products = np.einsum("bihf,bjf->bihj", index_q, index_k)
        shown = np.maximum(products, 0)
        scores = np.einsum("bih,bihj->bij", index_weights, shown)
        chosen = self.chosen(ids, seen, scores, call.options["top_k"])
        target, choice = self.target(call.options["q"], call.options["k"], chosen), self.choice(scores, chosen)
        logs = (np.log(np.where(x > 0, x, 1.0)) for x in (target, choice))
        of_query = (target * (next(logs) - next(logs))).sum(-1)
        share = self.share_of_queries(ids)
        losses = np.einsum("nbi,bi->n", share, of_query).astype(np.float32)
        if dout is None:
            return losses, {}
        of_scores = (choice - target) * np.einsum("n,nbi->bi", dout, share)[..., None]
        of_products = index_weights[..., None] * of_scores[:, :, None] * (products > 0)
        gradients = {
            "index_q": np.einsum("bihj,bjf->bihf", of_products, index_k),
            "index_k": np.einsum("bihj,bihf->bjf", of_products, index_q),
            "index_weights": np.einsum("bihj,bij->bih", shown, of_scores),
        }
        return losses, {name: x.astype(np.float32) for name, x in gradients.items()}

    def target(self, q: Array, k: Array, chosen: Array) -> Array:
        """``[B, S, S]``: the attention of all heads to chosen keys, which adds up to 1."""
        heads, kv_heads = q.shape[2], k.shape[2]
        z = np.einsum("bihd,bjhd->bhij", q, k.repeat(heads // kv_heads, 2), dtype=np.float64) * q.shape[3] ** -0.5
        return np.mean([self.choice(z[:, head], chosen) for head in range(heads)], axis=0)

    def choice(self, scores: Array, chosen: Array) -> Array:
        """``[B, S, S]``: the softmax of scores over chosen keys; 0 elsewhere, and for queries without one."""
        hidden = np.where(chosen, scores, -np.inf)
        exponents = np.exp(hidden - np.where(chosen.any(-1), hidden.max(-1), 0.0)[..., None])
        return exponents / np.maximum(exponents.sum(-1, keepdims=True), 1.0)

    def share_of_queries(self, segment_ids: Array) -> Array:
        """``[N, B, S]``: how much the divergence of each query counts in the loss of each segment."""
        every = segments(segment_ids)
        share = np.zeros((len(every), *segment_ids.shape))
        for number, (row, start, stop) in enumerate(every):
            share[number, row, start:stop] = 1 / (stop - start)
        return share
