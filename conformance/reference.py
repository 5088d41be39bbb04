"""The reference backend: packed rows in dense numpy, whole rows at a time. It registers as ``reference``.

It is the suite's proof that its requirements can be met, and what the mutants break. The oracle runs one document at a
time; this computes what a kernel computes, a mask over the whole row, states that are reset, positions that restart, so
the two agree only if both are right. Collating and planning are those of `packing_core`. Everything is float64 inside
and rounded to the working dtype once, at the end. Each rule that a mutant breaks is a method of its own.

Axis names as in `packing_core.protocol`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from conformance import decoder as numpy_decoder
from conformance.decoder import Sums
from conformance.draws import lay_out, round_to
from conformance.reference_clips import ClipMethods
from conformance.reference_context import CutMethods
from conformance.reference_documents import DocumentMethods
from conformance.reference_experts import ExpertMethods
from conformance.reference_scans import ScanMethods
from conformance.reference_selection import SelectionMethods
from conformance.reference_trees import TreeMethods
from packing_core.protocol import (
    Array,
    BackendFactory,
    Batch,
    Decoder,
    DecoderConfig,
    Document,
    Gradients,
    OperationCall,
    segments,
    takes_call,
)
from packing_core.protocol.backend import PackingMethods


def backends() -> Mapping[str, BackendFactory]:
    """The backends of the entry point ``reference``."""
    return {"reference": Reference}


class Reference(
    DocumentMethods,
    ScanMethods,
    SelectionMethods,
    ClipMethods,
    ExpertMethods,
    TreeMethods,
    CutMethods,
    PackingMethods,
):
    """Every level and every option of the protocol, in dense numpy."""

    description = f"numpy {np.__version__}"

    # -- attention -----------------------------------------------------------------------------------------------

    @takes_call("q", "k", "v")
    def attention(self, call: OperationCall) -> tuple[Array, Gradients]:
        # All ranks are in this process, so the slices are joined already.
        options = {name: value for name, value in call.options.items() if name != "context_ranks"}
        real = (call.segment_ids > 0)[..., None, None]
        q, k, v = (np.where(real | np.isfinite(x), x, 0.0) for x in call.operands.values())  # 0 times NaN would be NaN
        out, backward = self._attend(q, k, v, call.segment_ids, **options)
        gradients = {} if call.dout is None else backward(call.dout)
        return round_to(call.dtype, out), {name: round_to(call.dtype, x) for name, x in gradients.items()}

    def visible(self, segment_ids: Array, causal: bool, window: int | None) -> Array:
        """bool ``[B, S, S]``: whether a query (axis 1) sees a key (axis 2)."""
        run = np.cumsum(np.diff(segment_ids, axis=1, prepend=0) != 0, axis=1)  # an id may come again in its row
        column = np.arange(segment_ids.shape[1])
        ahead = column[:, None] - column  # query minus key
        seen: Array = (run[:, :, None] == run[:, None, :]) & (segment_ids[:, :, None] > 0)
        if causal:
            seen = seen & (ahead >= 0)
        if window is not None:
            seen = seen & (np.abs(ahead) < window)
        return seen

    def ahead_in_span(self, segment_ids: Array, spans: Array) -> Array:
        """bool ``[B, S, S]``: the keys after a query that it sees because they are in its span."""
        column = np.arange(segment_ids.shape[1])
        after: Array = (spans[:, :, None] == spans[:, None, :]) & (spans[:, :, None] >= 0)
        return after & self.visible(segment_ids, False, None) & (column[:, None] < column)

    def kv_head(self, heads: int, kv_heads: int) -> Array:
        """int ``[H]``: the key/value head that each query head reads."""
        return np.arange(heads) // (heads // kv_heads)

    def capped(self, z: Array, scale: float, softcap: float | None) -> tuple[Array, Array]:
        """Scores from ``q . k``, and their derivative."""
        if softcap is None:
            return z * scale, np.full_like(z, scale)
        tanh = np.tanh(z * scale / softcap)
        return tanh * softcap, (1 - tanh**2) * scale

    def weigh(self, p: Array, v: Array) -> Array:
        """``[B, H, S, E]``: values summed by their probabilities."""
        return p @ v

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        segment_ids: Array,
        *,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        scale: float | None = None,
        spans: Array | None = None,
        index_q: Array | None = None,
        index_k: Array | None = None,
        index_weights: Array | None = None,
        top_k: int | None = None,
        index_block: int = 1,
    ) -> tuple[Array, Callable[[Array], Gradients]]:
        heads, kv_heads = q.shape[2], k.shape[2]
        kv = self.kv_head(heads, kv_heads)
        q_, k_, v_ = (np.moveaxis(x.astype(np.float64), 2, 1) for x in (q, k[:, :, kv], v[:, :, kv]))  # [B, H, S, .]

        z, dz_by_score = self.capped(q_ @ k_.swapaxes(2, 3), q.shape[3] ** -0.5 if scale is None else scale, softcap)
        if alibi_slopes is not None:
            column = np.arange(q.shape[1])
            z = z - alibi_slopes.astype(np.float64)[:, None, None] * np.abs(column[:, None] - column)
        seen = self.visible(segment_ids, causal, window)[:, None]
        if index_q is not None and index_k is not None and index_weights is not None and top_k is not None:
            products = np.maximum(np.einsum("bihf,bjf->bihj", index_q, index_k, dtype=np.float64), 0)
            scores = np.einsum("bih,bihj->bij", index_weights, products)
            if index_block > 1:
                index = index_q, index_k, index_weights
                seen = self.chosen_blocks(segment_ids, seen[:, 0], index, top_k, index_block)[:, None]
            else:
                seen = self.chosen(segment_ids, seen[:, 0], scores, top_k)[:, None]
        if spans is not None:
            seen = seen | self.ahead_in_span(segment_ids, spans)[:, None]
        z = np.where(seen, z, -np.inf)
        largest = z.max(axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(np.float64)[:, None, None]
            largest = np.maximum(largest, sink)
        largest = np.where(np.isfinite(largest), largest, 0.0)  # a query at padding sees nothing
        weight = np.exp(z - largest)
        total = weight.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sink - largest)
        p = weight / np.where(total > 0, total, 1.0)
        out = np.moveaxis(self.weigh(p, v_), 1, 2)

        def backward(dout: Array) -> Gradients:
            dout_ = np.moveaxis(dout.astype(np.float64), 2, 1)
            dp = dout_ @ v_.swapaxes(2, 3)
            delta = (p * dp).sum(axis=-1, keepdims=True)
            dz = p * (dp - delta) * dz_by_score
            gradients = {
                "q": np.moveaxis(dz @ k_, 1, 2),
                "k": self._sum_groups(dz.swapaxes(2, 3) @ q_, kv, kv_heads),
                "v": self._sum_groups(p.swapaxes(2, 3) @ dout_, kv, kv_heads),
            }
            if sinks is not None:
                gradients["sinks"] = -(np.exp(sink - largest) / total * delta).sum(axis=(0, 2, 3))
            return gradients

        return out, backward

    @staticmethod
    def _sum_groups(x: Array, kv: Array, kv_heads: int) -> Array:
        """``[B, H, S, D]`` to ``[B, S, K, D]``: the query heads that read one key/value head, added up."""
        summed = np.zeros((x.shape[0], x.shape[2], kv_heads, x.shape[3]))
        for head, group in enumerate(kv):
            summed[:, :, group] += x[:, head]
        return summed

    # -- rope ----------------------------------------------------------------------------------------------------

    @takes_call("x")
    def rope(self, call: OperationCall) -> tuple[Array, Gradients]:
        angle = self.angles(call.options["position_ids"], call.options["inv_freq"])
        interleaved, dout = call.options.get("interleaved", False), call.dout
        out = self._turn(call.operands["x"].astype(np.float64), angle, interleaved)
        gradients = {} if dout is None else {"x": self._turn(dout.astype(np.float64), -angle, interleaved)}
        return round_to(call.dtype, out), {name: round_to(call.dtype, g) for name, g in gradients.items()}

    def angles(self, position_ids: Array, inv_freq: Array) -> Array:
        """``[B, S, R/2]``; ``inv_freq`` may be one row of frequencies, or one per token."""
        angles: Array = position_ids[..., None] * inv_freq.astype(np.float64)
        return angles

    @staticmethod
    def _turn(x: Array, angle: Array, interleaved: bool) -> Array:
        turned = 2 * angle.shape[-1]
        cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
        if interleaved:
            first, second = slice(0, turned, 2), slice(1, turned, 2)
        else:
            first, second = slice(0, turned // 2), slice(turned // 2, turned)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    # -- scan ----------------------------------------------------------------------------------------------------

    @takes_call("x", "dt", "A", "B", "C")
    def scan(self, call: OperationCall) -> tuple[Array, Gradients]:
        ids, dout = call.segment_ids, call.dout
        x, dt, A, B, C = (w.astype(np.float64) for w in call.operands.values())
        decay = np.exp(dt[..., None] * A) * self.carries(ids)[..., None, None]  # 0 where a segment starts
        real = (ids > 0)[..., None, None]
        inflow = real * dt[..., None] * B[:, :, None] * x[..., None]
        states = np.zeros_like(inflow)  # [B, S, M, N]
        for t in range(x.shape[1]):
            states[:, t] = inflow[:, t] + (decay[:, t] * states[:, t - 1] if t else 0.0)
        out = (states * C[:, :, None]).sum(axis=-1) * real[..., 0]
        if dout is None:
            return round_to(call.dtype, out), {}

        dy = dout.astype(np.float64)[..., None] * real
        dstates = dy * C[:, :, None]
        for t in reversed(range(x.shape[1] - 1)):
            dstates[:, t] += decay[:, t + 1] * dstates[:, t + 1]
        dstates = dstates * real
        before = np.concatenate([np.zeros_like(states[:, :1]), states[:, :-1]], axis=1)
        dexponent = dstates * decay * before
        by_channel = (dstates * B[:, :, None]).sum(axis=-1)
        gradients = {
            "x": by_channel * dt,
            "dt": by_channel * x + (dexponent * A).sum(axis=-1),
            "A": (dexponent * dt[..., None]).sum(axis=(0, 1)),
            "B": (dstates * (dt * x)[..., None]).sum(axis=2),
            "C": (states * dy).sum(axis=2),
        }
        return round_to(call.dtype, out), {name: round_to(call.dtype, g) for name, g in gradients.items()}

    def carries(self, segment_ids: Array) -> Array:
        """bool ``[B, S]``: whether the state comes over from the token before."""
        same = np.zeros(segment_ids.shape, bool)
        same[:, 1:] = segment_ids[:, 1:] == segment_ids[:, :-1]
        return same

    # -- loss ----------------------------------------------------------------------------------------------------

    def loss(
        self,
        logits: Array,
        labels: Array,
        segment_ids: Array,
        *,
        dtype: str,
        token_weights: Array | None = None,
    ) -> tuple[float, float, Array]:
        total, weight, dlogits = self._loss(logits, labels, segment_ids, token_weights)
        return total, weight, round_to(dtype, dlogits)

    def trained(self, labels: Array, segment_ids: Array) -> Array:
        """bool ``[B, S]``: whether a label trains the logits one token before it."""
        counts: Array = (labels != -100) & (segment_ids > 0)
        counts[:, 0] = False
        counts[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return counts

    def _loss(
        self, logits: Array, labels: Array, segment_ids: Array, token_weights: Array | None = None
    ) -> tuple[float, float, Array]:
        weights = self.trained(labels, segment_ids) * (1.0 if token_weights is None else token_weights)
        shifted = np.roll(weights, -1, axis=1).astype(np.float64)  # label t trains logits t - 1, and weights[:, 0] is 0
        targets = np.where(shifted != 0, np.roll(labels, -1, axis=1), 0)[..., None]
        z = logits.astype(np.float64)
        z = z - z.max(axis=-1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        total = -(shifted * np.take_along_axis(log_p, targets, axis=-1)[..., 0]).sum()
        dlogits = (np.exp(log_p) - (targets == np.arange(logits.shape[-1]))) * shifted[..., None]
        return float(total), float(weights.sum()), dlogits

    # -- model ---------------------------------------------------------------------------------------------------

    def forward(self, decoder: Decoder, batch: Batch, *, dtype: str) -> Array:
        logits, _ = self._decode(decoder, batch)
        return round_to(dtype, logits)

    def gradients(self, decoder: Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        mean, gradients = self.combine([[self.sums(decoder, batch)]])
        return mean, {name: round_to(dtype, g) for name, g in gradients.items()}

    def sums(self, decoder: Decoder, batch: Batch) -> Sums:
        """Loss sum, weight and gradients of the loss sum of one batch."""
        logits, backward = self._decode(decoder, batch)
        total, weight, dlogits = self._loss(logits, batch.labels, batch.segment_ids)
        return total, weight, backward(dlogits.reshape(-1, dlogits.shape[-1]))

    def _decode(self, decoder: Decoder, batch: Batch) -> tuple[Array, numpy_decoder.Backward]:
        logits, backward = numpy_decoder.run(decoder, batch.input_ids.ravel(), _Packed(self, batch, decoder.config))
        return logits.reshape(*batch.input_ids.shape, -1), backward

    def embed(
        self, decoder: Decoder, documents: Sequence[Document], *, how: str, dtype: str, dout: Array | None = None
    ) -> tuple[Array, Gradients]:
        batch = self.in_one_row(documents)
        h, backward = numpy_decoder.hidden(decoder, batch.input_ids.ravel(), _Packed(self, batch, decoder.config))
        share = self.shares_of([[place] for place in segments(batch.segment_ids)], batch.segment_ids.shape, how)
        gradients = {} if dout is None else backward(share.T @ dout)
        return round_to(dtype, share @ h), {name: round_to(dtype, x) for name, x in gradients.items()}

    def in_one_row(self, documents: Sequence[Document]) -> Batch:
        """The documents in their order, between padding."""
        return lay_out(((-3, *(len(document.input_ids) for document in documents), -2),), documents)

    def lengths(self, segment_ids: Array) -> Array:
        """int ``[B, S]``: the length by which each token's rotary frequencies are chosen."""
        lengths = np.ones_like(segment_ids)
        for row, start, stop in segments(segment_ids):
            lengths[row, start:stop] = stop - start
        return lengths

    # -- trainer -------------------------------------------------------------------------------------------------

    def train(
        self,
        decoder: Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        capacity: int,
        learning_rate: float,
        dtype: str,
        optimizer: str = "sgd",
        ranks: int = 1,
    ) -> tuple[list[float], dict[str, Array]]:
        losses, state = [], numpy_decoder.State()
        for number, microbatches in enumerate(steps, start=1):
            working = self.cast(decoder, dtype)
            found = [self.sums(working, self.collate(documents, capacity)) for documents in microbatches]
            mean, gradients = self.combine([found[rank::ranks] for rank in range(ranks)])
            losses.append(mean)
            decoder = numpy_decoder.updated(
                decoder, gradients, state, step=number, learning_rate=learning_rate, optimizer=optimizer
            )
        return losses, {name: round_to("float32", w) for name, w in decoder.weights.items()}

    @staticmethod
    def cast(decoder: Decoder, dtype: str) -> Decoder:
        """The decoder that the forward and the backward of a training step compute with."""
        return replace(decoder, weights={name: round_to(dtype, w) for name, w in decoder.weights.items()})

    def combine(self, by_rank: Sequence[Sequence[Sums]]) -> tuple[float, Gradients]:
        """The mean loss and its gradients from the sums of every rank's microbatches, divided once."""
        every = [sums for rank in by_rank for sums in rank]
        weight = sum(w for _, w, _ in every) or 1.0
        gradients = {name: np.sum([g[name] for _, _, g in every], axis=0) / weight for name in every[0][2]}
        return sum(t for t, _, _ in every) / weight, gradients


class _Packed(numpy_decoder.Mixing):
    """The decoder's mixing operations over the flattened rows of a batch, by the backend's own methods."""

    def __init__(self, backend: Reference, batch: Batch, config: DecoderConfig) -> None:
        self._backend = backend
        self._batch = batch
        self._window = config.sliding_window
        lengths = backend.lengths(batch.segment_ids)
        frequencies = {n: numpy_decoder.inv_freq(config, n) for n in np.unique(lengths).tolist()}
        of_token = np.stack([frequencies[n] for n in lengths.ravel().tolist()]).reshape(*lengths.shape, -1)
        self._angle = backend.angles(batch.position_ids, of_token)

    def rope(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        turn = self._backend._turn

        def back(dout: Array) -> Array:
            return self._flat(turn(self._rows(dout), -self._angle, False))

        return self._flat(turn(self._rows(x), self._angle, False)), back

    def attention(self, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        ids, window = self._batch.segment_ids, self._window
        out, backward = self._backend._attend(self._rows(q), self._rows(k), self._rows(v), ids, window=window)

        def back(dout: Array) -> tuple[Array, Array, Array]:
            found = backward(self._rows(dout))
            return self._flat(found["q"]), self._flat(found["k"]), self._flat(found["v"])

        return self._flat(out), back

    def _rows(self, x: Array) -> Array:
        return x.reshape(*self._batch.input_ids.shape, *x.shape[1:])

    def _flat(self, x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])
