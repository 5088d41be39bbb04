"""`PackedCollator`: documents or packed rows in, the tensors that a patched model takes out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packing_core import PackedBatch, pack, plan
from packing_core.batches.columns import read_examples
from packing_core.batches.documents import segments_by_document
from packing_core.batches.joining import concatenate
from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.batches.views import KernelView
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from packing_core.hints import hinted
from packing_core.planning.cost import cost_of
from packing_core.planning.pieces import check_lengths, positive
from torch_backend.collate.document_labels import LABELS, check_whole, in_order, take_numbers
from torch_backend.collate.model_traits import configs_of, has_router, labels_documents, labels_every_token
from torch_backend.collate.shared import pack_shared, sharing
from torch_backend.collate.tokens import EVERY_LABEL, check_first_labels, every_label, masked, with_every_label
from torch_backend.collate.vision import Loss, VisionReader
from torch_backend.packed_tokens import NOWHERE, packed_tokens

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
IN_ORDER: dict[str, Any] = {"strategy": "sequential", "seed": None}  # the plan of a batch without a capacity
FULL = 0.7  # rows that are less full than this are worth a warning
_DTYPES = {"i": np.int64, "u": np.int64, "f": np.float32}  # of columns, as torch makes tensors of lists


class PackedCollator:
    """Packs the documents of each batch, or takes rows that are packed, and emits what a patched model needs.

    Documents are packed inside a batch, never across batches: with ``capacity``, a batch of few documents leaves much
    padding, and the first batch that fills less than 70% of its rows is logged. To pack a whole dataset, use
    ``enable_packing(trainer)``, ``PackedDataset`` or ``pack_dataset``, whose rows this collator takes.

    Args:
        model: gives the token that fills padding (``config.pad_token_id``). If it has a router with an auxiliary loss,
            every batch has an ``attention_mask``, by which that loss leaves padding out. Optional.
        capacity: tokens of a row. None puts the documents of a batch one after the other into a single row without
            padding, so the number of tokens changes from batch to batch.
        padding_free: puts rows that come packed into one row, without their padding.
        max_seqlen, bucket: fixed sizes for compiled kernels, see ``PackedBatch.kernel_view``.
        share_prefix: computes a common beginning of a batch's documents once (``packing_core.pack_tree``). True shares
            every beginning of 16 tokens or more that holds no target. ``"auto"`` shares those of 64 or more where that
            saves at least a tenth of the batch's work, if the model can run them and has no dropout. The work of
            segments of n tokens after b tokens of their ancestors is ``a sum(n) + s sum(n (n + 2 b))``: a token and an
            attention pair by ``Cost.from_config(model.config)``. Losses are then computed by ``make_train_step``,
            ``causal_lm_loss`` or ``token_logprobs``.
        processor: of a model of images or audio. Features are then examples with images or clips, raw or processed, or
            rows of a ``PackedMediaDataset`` (:class:`torch_backend.collate.vision.VisionReader`). Their tokens are
            never trained, and images and clips never cut.
        loss: what is trained of a chat with images or audio, ``"all"`` or the ``"assistant"``'s turns.
        masking: a ``DataCollatorForLanguageModeling`` with ``mlm=True``, which hides tokens of every batch and makes
            the labels, for masked language models.
        plan_options: ``overflow``, ``max_segments`` and the other options of ``packing_core.plan``.

    A feature is a ``PackedBatch``, or a mapping with ``input_ids`` and the columns that
    :func:`packing_core.batches.columns.read_columns` names: ``labels``, masks and prompt lengths say what is trained,
    ``attention_mask`` says what is padding, and ``seq_lengths`` cuts a packed row into its documents.
    """

    @hinted(plan)
    def __init__(
        self,
        model: Any = None,
        capacity: int | None = None,
        *,
        padding_free: bool = False,
        max_seqlen: int | None = None,
        bucket: int = 1,
        share_prefix: bool | Literal["auto"] = False,
        masking: Any = None,
        processor: Any = None,
        loss: Loss = "all",
        **plan_options: Any,
    ) -> None:
        configs = _checked_configs(model)
        idle = [f"{name}={value!r}" for name, value in plan_options.items() if IN_ORDER.get(name, name) != value]
        if capacity is None and idle:
            raise PackingError(
                f"{idle[0]} has no effect without a capacity, because all documents of a batch then go into one row: "
                "pass PackedCollator(model, capacity, ...)"
            )
        pads = [config.pad_token_id for config in configs if getattr(config, "pad_token_id", None) is not None]
        self.pad_id = int(pads[0]) if pads else 0
        self.marks_padding = has_router(model)
        self.knows_model = isinstance(model, nn.Module)
        self.labels_every_token = labels_every_token(model)
        self.labels_documents = labels_documents(model)
        self.capacity = None if capacity is None else positive("capacity", capacity)
        self.padding_free = padding_free
        self.max_seqlen = max_seqlen
        self.bucket = bucket
        self.masking = masking
        self.share_prefix = sharing(share_prefix, model, masking)
        self.cost = cost_of(configs)
        self.plan_options = {"seed": None, **plan_options}
        self.vision = None if processor is None else VisionReader(model, processor, loss=loss)
        if self.vision is not None:
            self._check_options_with_images()
            self.pad_id = self.vision.pad_id(self.pad_id)
        self._warned = False

    def __call__(self, features: PackedBatch | Sequence[Any]) -> Batch:
        """One batch.

        Returns:
            ``input_ids``, ``labels``, ``position_ids`` int64 [B, S]; ``seq_idx`` int32 [B, S]; ``cu_seq_lens_q`` and
            ``_k`` int32 [N+1] over the B * S tokens, padding in segments of its own; ints ``max_length_q`` and ``_k``;
            ``packed_lengths``, the segments' lengths as a tuple; ``packed_documents``, the numbers of each document's
            segments in source order (see :func:`torch_backend.reduce`), left out if a document is in the batch twice;
            for a model with a router loss ``attention_mask`` int64 [B, S], 0 at padding; and the user's own columns [B,
            S], int64, float32 or bool. Rows with ``weighting="document"`` have ``loss_weights`` float32 [B, S], which
            ``make_train_step`` and ``causal_lm_loss`` count and every other loss refuses. A model that classifies
            documents gets ``labels`` [documents] or [documents, C] in source order, and columns of one number per
            document, such as a weight, [documents] likewise. One that classifies documents or tokens gets no ``labels``
            if there are none.

        Raises:
            LayoutError: the features contradict each other, or a document is split or there twice and the model
                classifies documents.
        """
        if self.vision is not None and len(features):
            rows = self.vision.rows(features, self.pack, self.capacity, self.plan_options.get("overflow", "error"))
            return self.vision.emit(self._emit(rows.batch), rows)
        if isinstance(features, PackedBatch):
            return self._emit(features)
        if len(features) == 0:
            raise LayoutError("there are no features to collate")
        if isinstance(features[0], PackedBatch):
            return self._emit(concatenate(features))
        return self._emit(self.pack(features))

    def _check_options_with_images(self) -> None:
        """Raise if an option has no meaning for documents with images."""
        if self.share_prefix is not False or self.masking is not None:
            raise UnsupportedError("documents with images share no prefixes and hide no tokens: leave the option out")
        if self.labels_every_token or self.labels_documents:
            raise UnsupportedError("processor= serves models of the next token: pack text alone for classifiers")

    def _emit(self, batch: PackedBatch) -> Batch:
        every_token = self.labels_every_token and self.masking is None
        if not (self.knows_model or self.masking is not None or batch.labels is None):
            starts = batch.boundaries & (batch.predictors < 0)
            check_first_labels(batch.input_ids, every_label(batch), starts, way_out="crosspack.PackedCollator(model)")
        labeled = every_token and batch.labels is not None
        if labeled:
            batch = with_every_label(batch)
        if self.labels_documents:
            check_whole(batch)
        weighted = batch.weighting == "document"
        if weighted and (every_token or self.labels_documents or self.masking is not None):
            raise UnsupportedError(
                'weighting="document" weighs next-token losses: pack with weighting="token" for models that classify '
                "tokens or documents, and for masked language models"
            )
        in_one_row = self.padding_free or (self.share_prefix is not False and self.capacity is None and len(batch) == 1)
        make = batch.padding_free if in_one_row else batch.kernel_view
        view = make(max_seqlen=self.max_seqlen, bucket=self.bucket)
        emitted = _to_torch(view, rows=1 if in_one_row else len(batch))
        emitted |= _documents(batch, view, needed=self.labels_documents)
        if weighted:
            emitted["loss_weights"] = torch.from_numpy(view.loss_weights.copy()).view_as(emitted["input_ids"])
        if every_token:
            del emitted[LABELS]
        if labeled:
            emitted[LABELS] = emitted.pop(EVERY_LABEL).long() + IGNORE_INDEX
        if self.labels_documents:
            emitted = {name: x for name, x in emitted.items() if name != LABELS} | in_order(batch)
        if self.marks_padding:
            real = np.repeat(~np.array(view.is_padding), view.lengths)
            emitted["attention_mask"] = torch.from_numpy(real.astype(np.int64)).view_as(emitted["input_ids"])
        if self.masking is not None:
            special = emitted.pop("special_tokens_mask", None)
            padding = np.repeat(view.is_padding, view.lengths)
            emitted |= masked(self.masking, emitted["input_ids"], padding, special)
        unfilled = torch.from_numpy(np.repeat(view.is_padding, view.lengths)).view_as(emitted["input_ids"])
        segments = emitted[BatchKey.NUMBERS].masked_fill(unfilled, NOWHERE)
        return {**emitted, "input_ids": packed_tokens(emitted["input_ids"], segments)}

    def pack(self, features: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """The rows of a batch's documents, before they become tensors."""
        per_document: dict[str, Any] = {}
        if self.labels_documents:
            features, per_document = take_numbers(features)
        documents = read_examples(features)
        check_lengths(documents.input_ids.lengths)  # or empty documents alone would ask for a capacity of 0
        given = {
            "labels": documents.labels,
            "loss_mask": documents.loss_mask,
            "prompt_lengths": documents.prompt_lengths,
            "columns": documents.columns,
            "per_document": per_document,
            "pad_id": self.pad_id,
            **(self.plan_options if self.capacity else IN_ORDER),
        }
        capacity = self.capacity or int(documents.input_ids.lengths.sum())
        if self.share_prefix is False:
            packed = pack(documents.input_ids, capacity, **given)
        else:
            packed = pack_shared(documents.input_ids, capacity, self.share_prefix, self.cost, **given)
        if self.capacity and packed.efficiency < FULL and not self._warned:
            self._warned = True
            logger.warning(
                "rows of %d tokens are %.0f%% full, because PackedCollator packs inside a batch, here of %d documents: "
                "pack the whole data set by enable_packing(trainer), pack_dataset or PackedDataset",
                packed.capacity,
                100 * packed.efficiency,
                len(documents.input_ids),
            )
        return packed


def _to_torch(view: KernelView, rows: int) -> Batch:
    def tensor(array: NDArray[Any], dtype: Any = None) -> Tensor:
        return torch.from_numpy(np.array(array, dtype)).view(rows, -1)

    cu_seqlens = torch.from_numpy(view.cu_seqlens.copy())
    return {
        "input_ids": tensor(view.input_ids, np.int64),
        "labels": tensor(view.targets, np.int64),
        "position_ids": tensor(view.position_ids, np.int64),
        **segment_keys(cu_seqlens, tensor(view.seq_idx), view.max_seqlen, view.lengths),
        **({} if view.parents is None else {BatchKey.PARENTS: view.parents}),
        **{name: tensor(array, _DTYPES.get(array.dtype.kind)) for name, array in view.columns.items()},
    }


def segment_keys(cu_seqlens: Tensor, numbers: Tensor, longest: int, lengths: tuple[int, ...]) -> Batch:
    """Writes where the segments of a batch lie: their boundaries [N+1], the number of each token's [B, S], lengths."""
    return {
        BatchKey.NUMBERS: numbers,
        BatchKey.BOUNDARIES: cu_seqlens,
        BatchKey.KEY_BOUNDARIES: cu_seqlens.clone(),
        **dict.fromkeys(BatchKey.LONGEST_OF_BOTH, longest),
        BatchKey.LENGTHS: lengths,
    }


def _documents(batch: PackedBatch, view: KernelView, *, needed: bool) -> Batch:
    """The segments of each document, by their numbers in the view; nothing if a document is in the batch twice.

    Raises:
        LayoutError: a document is in the batch twice, and they are ``needed``.
    """
    try:
        _, order, counts = segments_by_document(batch)
    except LayoutError:
        if needed:
            raise
        return {}
    numbers = np.flatnonzero(~np.array(view.is_padding, np.bool_))[order]
    pieces = np.split(numbers, np.cumsum(counts)[:-1]) if len(counts) else []
    return {BatchKey.DOCUMENTS: tuple(tuple(piece.tolist()) for piece in pieces)}


def _checked_configs(model: Any) -> list[Any]:
    """Returns the configurations of what was passed as a model.

    Raises:
        PackingError: it is neither a model nor a configuration.
    """
    if isinstance(model, int | float | str):
        raise PackingError(
            f"PackedCollator takes the model first and got {model!r}: pass PackedCollator(model, {model!r}), or "
            f"PackedCollator(capacity={model!r}) without a model"
        )
    configs = configs_of(model)
    if model is not None and not configs and not isinstance(model, nn.Module):
        raise PackingError(
            f"PackedCollator takes the model first and got a {type(model).__name__}: pass PackedCollator(model), which "
            "pads by model.config.pad_token_id"
        )
    return configs
