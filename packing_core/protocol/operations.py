"""`Operations`: the methods of a backend that take arrays and segment ids, each refusing until it is overridden."""

from __future__ import annotations

from collections.abc import Sequence

from packing_core.errors import UnsupportedError
from packing_core.protocol.data import Array, Gradients, Place
from packing_core.reference.experts import ExpertActivation


class Operations:
    """The operations of one stack, apart from any model: `Backend` inherits them."""

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        segment_ids: Array,
        *,
        dtype: str,
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
        context_ranks: int = 1,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """Attention of every segment over itself, and its vector-Jacobian product.

        Scores are scaled, softcapped, biased and masked in that order; a sink is one more logit of the denominator.

        Args:
            q: ``[B, S, H, D]``.
            k: ``[B, S, K, D]``; K below H takes the option "gqa" (query head h reads head ``h // (H // K)``).
            v: ``[B, S, K, E]``; E below D takes the option "narrow_values".
            segment_ids: ``[B, S]``. With the option "arbitrary_ids" also ids that are positive and constant over a
                segment and otherwise anything: global over the rows, unsorted, beyond S, the same in two segments.
            causal: False takes the option "bidirectional".
            window: keys visible to a query, its own included, counted inside the segment.
            sinks: ``[H]`` logits.
            alibi_slopes: ``[H]``; the bias is ``-slope * |i - j|``.
            scale: None for ``D ** -0.5``.
            spans: int64 ``[B, S]`` takes the option "both_ways", and comes with causal attention alone. Tokens of one
                segment with the same number, 0 or above, are a span (an image, a prefix): they see one another in both
                directions. A window counts keys behind the query alone. The same number in another segment is another
                span; -1 is none, also at padding.
            index_q: float32 ``[B, S, I, F]`` takes the option "selected_keys", and comes with the next three and causal
                attention alone, without a window and ALiBi. A query sees the ``top_k`` keys of its segment, none after
                it, with the largest scores ``sum_h index_weights[h] relu(index_q[h] . index_k)``, any of equal ones.
                They have no gradients.
            index_k: ``[B, S, F]``.
            index_weights: ``[B, S, I]``.
            top_k: at least 1.
            index_block: above 1 takes the option "selected_blocks". Blocks of so many keys are selected, counted from
                the first token of the segment: the ``top_k`` whose mean of ``index_k`` scores highest among those that
                end at the query or before it. A query also sees the keys behind the last of those that end, up to
                itself. Weights are not below 0.
            context_ranks: above 1 takes the option "context_parallel": so many ranks each hold ``S / context_ranks``
                neighbouring tokens of every row. The adapter splits the arrays and joins the answers.
            dout: ``[B, S, H, E]``, zero at padding; None for the forward alone.

        Returns:
            ``[B, S, H, E]``, finite at padding, and with ``dout`` the gradients ``{"q", "k", "v"}`` (and "sinks" when
            given), exactly zero at padding; without it an empty dict.
        """
        raise self._lacks("attention")

    def rope(
        self,
        x: Array,
        position_ids: Array,
        inv_freq: Array,
        *,
        dtype: str,
        interleaved: bool = False,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """Rotate the first ``R = 2 * len(inv_freq)`` channels by ``position * inv_freq``; the vector-Jacobian product.

        Args:
            x: ``[B, S, H, D]``; R below D takes the option "partial".
            position_ids: int64 ``[B, S]``.
            inv_freq: float32 ``[R/2]``. Angles, their sines and cosines are float32 or wider, whatever the dtype.
            interleaved: pairs are (2i, 2i+1), not (i, i + R/2).
            dout: ``[B, S, H, D]`` or None.

        Returns:
            ``[B, S, H, D]`` and ``{"x": ...}`` (empty without ``dout``).
        """
        raise self._lacks("rope")

    def scan(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        segment_ids: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """Selective scan (Mamba, arXiv 2312.00752, section 3.2) whose state starts from zero at every segment.

        ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t``, ``y_t = C_t . h_t``: no skip, no gate.

        Args:
            x: ``[B, S, M]`` channels.
            dt: ``[B, S, M]`` positive steps.
            A: ``[M, N]`` negative decay rates, N states a channel.
            B: ``[B, S, N]``.
            C: ``[B, S, N]``.
            segment_ids: ``[B, S]``.
            dout: ``[B, S, M]``, zero at padding, or None.

        Returns:
            ``[B, S, M]`` and the gradients ``{"x", "dt", "A", "B", "C"}`` (empty without ``dout``), zero at padding.
        """
        raise self._lacks("scan")

    def delta_rule(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        beta: Array,
        segment_ids: Array,
        *,
        dtype: str,
        normalise: bool = False,
        parents: Array | None = None,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """The gated delta rule (arXiv 2412.06464, equation 10) whose state starts from zero at every segment.

        ``S' = exp(g_t) S_{t-1}``, ``S_t = S' + k_t beta_t (v_t - S'^T k_t)^T``, ``o_t = D ** -0.5 S_t^T q_t``.

        Args:
            q: ``[B, S, K, D]``; K below H takes the option "grouped_values" (head h of v reads head ``h // (H // K)``).
            k: ``[B, S, K, D]``.
            v: ``[B, S, H, E]``.
            g: ``[B, S, H]``, the log of the decay, at most 0; ``[B, S, H, D]`` takes the option "channel_decay", and
                comes with K = H.
            beta: ``[B, S, H]``, from 0 to 2; above 1 the state's part along k changes its sign.
            segment_ids: ``[B, S]``.
            normalise: True takes the option "normalise": every head of q and k is divided by
                ``sqrt(sum(x^2) + 1e-6)`` first. Without it they have that norm already.
            parents: int64 ``[N]``: the number of the segment, in row order, from whose last state each one starts; -1
                for zero. A parent stands before its children in their row. Takes the option "continued_segments".
            dout: ``[B, S, H, E]``, zero at padding, or None.

        Returns:
            ``[B, S, H, E]`` and the gradients ``{"q", "k", "v", "g", "beta"}`` (empty without ``dout``), zero at
            padding.
        """
        raise self._lacks("delta_rule")

    def ssd(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        D: Array,
        segment_ids: Array,
        *,
        dtype: str,
        parents: Array | None = None,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """The scan of Mamba-2 (arXiv 2405.21060, section 5) whose state starts from zero at every segment.

        ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T``, ``y_t = h_t C_t + D x_t``: no gate; bias and softplus of the
        steps are applied.

        Args:
            x: ``[B, S, H, P]`` channels of heads.
            dt: ``[B, S, H]`` positive steps.
            A: ``[H]`` negative decay rates.
            B: ``[B, S, G, N]``, N states; group g serves heads ``g * H / G`` to ``(g + 1) * H / G - 1``.
            C: ``[B, S, G, N]``.
            D: ``[H]``.
            segment_ids: ``[B, S]``.
            parents: int64 ``[N]``, as for `delta_rule`; takes the option "continued_segments".
            dout: ``[B, S, H, P]``, zero at padding, or None.

        Returns:
            ``[B, S, H, P]`` and the gradients ``{"x", "dt", "A", "B", "C", "D"}`` (empty without ``dout``), zero at
            padding.
        """
        raise self._lacks("ssd")

    def convolution(
        self,
        x: Array,
        weight: Array,
        bias: Array,
        segment_ids: Array,
        *,
        dtype: str,
        parents: Array | None = None,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """The short causal convolution of recurrent layers (arXiv 2312.00752, section 3.4), inside every segment.

        ``y_t = bias + sum_w weight[:, W - 1 - w] x_{t-w}`` over the lags ``0 <= w < W`` that stay in the segment: no
        activation.

        Args:
            x: ``[B, S, E]``.
            weight: ``[E, W]``; the last one belongs to the current token.
            bias: ``[E]``.
            segment_ids: ``[B, S]``.
            parents: int64 ``[N]``, as for `delta_rule`: a segment sees the last tokens of the one that it continues,
                and of what that continues. Takes the option "continued_segments".
            dout: ``[B, S, E]``, zero at padding, or None.

        Returns:
            ``[B, S, E]`` and the gradients ``{"x", "weight", "bias"}`` (empty without ``dout``), zero at padding.
        """
        raise self._lacks("convolution")

    def index_loss(
        self,
        index_q: Array,
        index_k: Array,
        index_weights: Array,
        q: Array,
        k: Array,
        segment_ids: Array,
        *,
        top_k: int,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """The loss by which an indexer learns what attention looks at (DeepSeek-V3.2, arXiv 2512.02556, equation 4).

        Of a query it is the divergence of the softmax of its scores from its attention, both over the ``top_k`` keys
        that it selects as in `attention`; attention is added up over heads and divided by its sum. Of a segment it is
        the mean over its tokens.

        Args:
            index_q: float32 ``[B, S, I, F]``; index_k: ``[B, S, F]``; index_weights: ``[B, S, I]``.
            q: ``[B, S, H, D]``; k: ``[B, S, K, D]``. They have no gradients.
            segment_ids: ``[B, S]``.
            dtype: of q and k; what is returned is in float32.
            dout: ``[N]``, or None.

        Returns:
            ``[N]``, segments in reading order, and the gradients ``{"index_q", "index_k", "index_weights"}`` (empty
            without ``dout``), zero at padding.
        """
        raise self._lacks("index_loss")

    def clips(
        self,
        features: Array,
        frames: Array,
        up: Array,
        up_bias: Array,
        down: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """The two convolutions in front of an audio encoder over clips of different length, without activations.

        Each is over three frames, with zeros before the first and behind the last frame of the features; the second is
        of stride 2. A clip of L frames keeps its first ``(L + 1) // 2`` outputs, which see up to two frames behind it.

        Args:
            features: ``[N, T, C]``, anything finite behind the end of a clip.
            frames: int64 ``[N]``, L of each clip, 1 to T.
            up: ``[D, C, 3]``; up_bias: ``[D]``; down: ``[E, D, 3]``.
            dout: ``[P, E]``, or None.

        Returns:
            ``[P, E]``, the outputs of one clip after the other, and the gradients ``{"features", "up", "up_bias",
            "down"}`` (empty without ``dout``).
        """
        raise self._lacks("clips")

    def experts(
        self,
        x: Array,
        indices: Array,
        weights: Array,
        up: Array,
        down: Array,
        segment_ids: Array,
        *,
        dtype: str,
        activation: ExpertActivation,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """The weighted sum of the experts that each token chose; padding goes to none.

        ``y_t = sum_c weights[t, c] (down[e] f(up[e] x_t + up_bias[e]) + down_bias[e])`` with ``e = indices[t, c]``.

        Args:
            x: ``[B, S, D]``.
            indices: int64 ``[B, S, K]``, different ones for each token; at padding too, where they must not count.
            weights: ``[B, S, K]``.
            up: ``[E, O, D]``, O being 2I with gates, whose rows come first, and I without.
            down: ``[E, D, I]``.
            segment_ids: ``[B, S]``.
            activation: f; one with a limit takes the option "clamped_experts", one without gates "ungated_experts".
            up_bias: ``[E, O]``. down_bias: ``[E, D]``. They take the option "biased_experts".
            dout: ``[B, S, D]``; None for the forward alone.

        Returns:
            ``[B, S, D]``, exactly zero at padding; and with ``dout`` the gradients of every floating argument by name,
            those of x and the weights exactly zero at padding; without it an empty dict.
        """
        raise self._lacks("experts")

    def loss(
        self,
        logits: Array,
        labels: Array,
        segment_ids: Array,
        *,
        dtype: str,
        token_weights: Array | None = None,
    ) -> tuple[float, float, Array]:
        """Next-token cross-entropy as a sum and a weight, so that it can be divided once.

        Args:
            logits: ``[B, S, V]``.
            labels: int64 ``[B, S]`` **as given**: ``labels[t]`` trains the logits at t-1, -100 is not trained on.
                Labels at a segment's first token and at padding are present here and must not count.
            segment_ids: ``[B, S]``.
            token_weights: ``[B, S]`` weight of each label, aligned with ``labels``, of either sign or 0; None for 1.

        Returns:
            The loss sum, the weight sum, and the gradient of the loss sum ``[B, S, V]``, zero where nothing is trained.
        """
        raise self._lacks("loss")

    def reduce(
        self,
        values: Array,
        documents: Sequence[Sequence[Place]],
        *,
        dtype: str,
        how: str,
        where: Array | None = None,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        """One number per document from one per token, and its vector-Jacobian product.

        Args:
            values: ``[B, S]``; anything at padding.
            documents: the pieces of each of N documents, as ``(row, start, stop)``, in reading order. The pieces of a
                document that was split stand in any rows. What is in no piece is padding.
            how: "sum", "mean" over the tokens that count, "first" or "last" of them.
            where: bool ``[B, S]``, the tokens that count; None for all that are no padding.
            dout: ``[N]``; None for the forward alone.

        Returns:
            ``[N]`` in the order of the documents, 0 for one without a token that counts; and with ``dout`` the gradient
            ``{"values"}`` ``[B, S]``, exactly zero at what does not count; without it an empty dict.
        """
        raise self._lacks("reduce")

    def _lacks(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} has no {method}: override it to take part")
