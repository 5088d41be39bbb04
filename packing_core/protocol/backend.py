"""`Backend`: the methods by which a stack takes part in the suite, each refusing until it is overridden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import pack
from packing_core.errors import UnsupportedError
from packing_core.planning.plan import plan
from packing_core.protocol.capabilities import Capabilities
from packing_core.protocol.data import Array, Batch, Decoder, Document, Gradients
from packing_core.protocol.operations import Operations


class Backend(Operations):
    """One stack under test. Subclass it, override what the stack has, declare the rest away in `capabilities`.

    Its operations (attention, scans, losses) are described in `Operations`. No method changes its arguments, whose
    arrays may lie in memory in any order.

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
            dout: ``[B, S]``, any numbers where nothing is trained too; None for the forward alone.

        Returns:
            ``[B, S]``: ``log p(labels[t])`` of the logits at t-1, standing at t; 0 where the label is -100. With
            ``dout`` the gradient of its inner product with the log-probabilities, by weight name.
        """
        raise self._lacks("logprobs")

    def embed(
        self, decoder: Decoder, documents: Sequence[Document], *, how: str, dtype: str, dout: Array | None = None
    ) -> tuple[Array, Gradients]:
        """One vector of each document, pooled from its last hidden states of width C, and its vector-Jacobian product.

        Args:
            documents: which the adapter lays out as its stack does, and whose labels do not count.
            how: the "first" token, the "last" one, or the "mean" of all.
            dout: ``[N, C]``; None for the forward alone.

        Returns:
            ``[N, C]`` in the order of the documents. With ``dout`` the gradient of its inner product with these, by
            weight name.
        """
        raise self._lacks("embed")

    def shared_gradients(
        self, decoder: Decoder, documents: Sequence[Document], *, dtype: str
    ) -> tuple[float, Gradients, int]:
        """Loss and gradients of documents whose common beginnings are computed once (option "shared_prefixes").

        Args:
            documents: some of which share their first tokens, on several levels, or are equal. A common beginning has
                16 tokens at least; labels in it count once for each of its documents.

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


class PackingMethods(Backend):
    """`plan` and `collate` of a stack that packs by `packing_core`."""

    def plan(self, lengths: Sequence[int], capacity: int, *, strategy: str) -> list[list[int]]:
        return plan(lengths, capacity, strategy=strategy, seed=None).to_lists()  # type: ignore[arg-type]

    def collate(self, documents: Sequence[Document], capacity: int) -> Batch:
        return batch_of(pack_documents(documents, capacity))


def pack_documents(documents: Sequence[Document], capacity: int) -> PackedBatch:
    """Packs documents with their labels."""
    return pack([d.input_ids for d in documents], capacity, labels=[d.labels for d in documents])


def batch_of(packed: PackedBatch) -> Batch:
    """Returns packed rows under the suite's names."""
    arrays = (packed.input_ids, packed.segment_ids, packed.position_ids, packed.targets)
    return Batch(*(np.asarray(x, np.int64) for x in arrays))
