"""`Backend`: the methods by which a stack takes part in the suite, each refusing until it is overridden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from packing_core.errors import UnsupportedError
from packing_core.protocol.capabilities import Capabilities
from packing_core.protocol.data import Array, Batch, Decoder, Document, Gradients, Place
from packing_core.reference.experts import ExpertActivation


class Backend:
    """One stack under test. Subclass it, override what the stack has, declare the rest away in `capabilities`.

    Attributes:
        capabilities: what is served; see `Capabilities`.
        description: versions and device, printed in the report.
    """

    capabilities: Capabilities = Capabilities()
    description: str = ""

    @classmethod
    def provides(cls, method: str) -> bool:
        """Returns whether the class overrides ``method``, which is how a backend takes part in a level."""
        return getattr(cls, method) is not getattr(Backend, method)

    # -- collator ------------------------------------------------------------------------------------------------

    def plan(self, lengths: Sequence[int], capacity: int, *, strategy: str) -> list[list[int]]:
        """Decide which document goes into which row, by counts alone (they may pass 2^31).

        Args:
            lengths: tokens of each document, each at most ``capacity``.
            strategy: "best_fit" (decreasing), or as declared "first_fit" (decreasing), "sequential" (next fit in the
                input's order).

        Returns:
            Document numbers per row; rows in the order they were opened.
        """
        raise self._lacks("plan")

    def collate(self, documents: Sequence[Document], capacity: int) -> Batch:
        """Pack documents into rows of at most ``capacity`` tokens, with every label the model is to be trained on.

        A collator that has no capacity (it puts all documents into one row) leaves the option "capacity" out; it is
        then given documents that fit into one row together, and refuses others.

        Raises:
            Exception: of any kind, when a document is longer than ``capacity``; it must not be cut or dropped.
        """
        raise self._lacks("collate")

    # -- operations ----------------------------------------------------------------------------------------------

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
            alibi_slopes: ``[H]``; the bias is ``-slope * (i - j)``.
            scale: None for ``D ** -0.5``.
            spans: int64 ``[B, S]`` takes the option "both_ways", and comes with causal attention alone. Tokens of one
                segment with the same number, 0 or above, are a span (an image, a prefix): they see one another in both
                directions. A window counts keys behind the query alone. The same number in another segment is another
                span; -1 is none, also at padding.
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
            g: ``[B, S, H]``, the log of the decay, at most 0; ``[B, S, H, D]`` takes the option "channel_decay".
            beta: ``[B, S, H]``, from 0 to 1.
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
            token_weights: ``[B, S]`` weight of each label, aligned with ``labels``; None for 1.

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

    # -- model ---------------------------------------------------------------------------------------------------

    def forward(self, decoder: Decoder, batch: Batch, *, dtype: str) -> Array:
        """Logits ``[B, S, V]`` of a batch.

        A backend that has a collator is given its own batches, and with the option "drawn_batches" also ones in which
        the suite laid out the rows (``native`` None: padding anywhere, any B); one that has no collator only those.
        """
        raise self._lacks("forward")

    def gradients(self, decoder: Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        """The mean loss over the batch's trained labels and its gradient by weight name; 0 where nothing is trained."""
        raise self._lacks("gradients")

    def logprobs(
        self, decoder: Decoder, batch: Batch, *, dtype: str, temperature: float = 1.0, dout: Array | None = None
    ) -> tuple[Array, Gradients]:
        """The log-probability of each trained label of a batch, and its vector-Jacobian product.

        Args:
            batch: of the backend's own collator, or laid out by the suite where it has none.
            temperature: divides the logits; other than 1 takes the option "temperature".
            dout: ``[B, S]``; None for the forward alone.

        Returns:
            ``[B, S]``: ``log p(labels[t])`` of the logits at t-1, standing at t; 0 where the label is -100. With
            ``dout`` the gradient of its inner product with the log-probabilities, by weight name.
        """
        raise self._lacks("logprobs")

    def shared_gradients(
        self, decoder: Decoder, documents: Sequence[Document], *, dtype: str
    ) -> tuple[float, Gradients, int]:
        """Loss and gradients of documents whose common beginnings are computed once (option "shared_prefixes").

        Args:
            documents: some of which share their first tokens, on several levels; only what follows is trained. A
                common beginning has 16 tokens at least.

        Returns:
            The mean loss over all trained labels, its gradient by weight name, and the number of tokens that the
            decoder computed.
        """
        raise self._lacks("shared_gradients")

    def context_gradients(
        self, decoder: Decoder, documents: Sequence[Document], *, ranks: int, dtype: str
    ) -> tuple[float, Gradients, list[int]]:
        """Loss and gradients of documents that are cut over the ranks of one group (option "cut_documents").

        Args:
            documents: of which one has more tokens than a rank's share.
            ranks: how many there are; the adapter starts them.

        Returns:
            The mean loss over all trained labels, its gradient by weight name, and the number of tokens that each rank
            computed.
        """
        raise self._lacks("context_gradients")

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
        """Train from the decoder's weights, which stay as they are, packing with the stack's own collator.

        Args:
            steps: ``steps[i][j]`` are the documents of microbatch j of optimizer step i.
            capacity: tokens a row can hold.
            dtype: "float32"; with the option "mixed_precision" another declared one, in which the forward and the
                backward then compute, while weights, summed gradients and the optimizer's state stay float32.
            optimizer: "sgd" (plain, no momentum) or as declared "adamw" (betas 0.9 and 0.999, `ADAMW_EPSILON`, no
                decay).
            ranks: over how many data-parallel ranks microbatch j goes to rank ``j % ranks`` (option "ranks" above 1).

        Returns:
            Per step the mean loss over its trained labels (0 without any), before the update; and the weights after
            the last step.
        """
        raise self._lacks("train")

    def preference(
        self, decoder: Decoder, microbatches: Sequence[Sequence[Document]], *, capacity: int, beta: float, dtype: str
    ) -> tuple[float, Gradients]:
        """The preference loss of one optimizer step, packed by the stack's own collator, and its gradients.

        ``-log sigmoid(beta (sum log p(chosen) - sum log p(rejected)))`` (DPO, https://arxiv.org/abs/2305.18290,
        equation 7, without a reference), with the sums over each document's trained labels, as a mean over all pairs of
        the step.

        Args:
            microbatches: documents 2i and 2i + 1 of a microbatch are the chosen and the rejected one of a pair.
            capacity: tokens a row can hold; the documents of a pair may come to stand in different rows.

        Returns:
            The mean and its gradient by weight name.
        """
        raise self._lacks("preference")

    def _lacks(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} has no {method}: override it to take part")


BackendFactory = Callable[[], Backend]


def require_declared(backend: Backend, **request: Any) -> None:
    """Refuse an undeclared request in one line, for adapters whose stack does not refuse by itself.

    Args:
        backend: whose `Capabilities` decide.
        request: the keyword arguments of `Capabilities.refusal`.

    Raises:
        UnsupportedError: the request is not declared.
    """
    reason = backend.capabilities.refusal(**request)
    if reason is not None:
        raise UnsupportedError(f"{type(backend).__name__}: {reason}")
