"""Collators that carry the segments of a batch to a patched model.

:class:`PackedCollator` takes documents, or rows of a ``PackedDataset``, and packs them. :class:`BoundaryCollator` wraps
another collator and reads the documents of its batches (``packing_core.batches.marks``). Both return CPU tensors under
the names that Hugging Face models take, and plain Python values that device movers leave alone. A ``PackedDataset`` is
a map-style dataset: ``DataLoader(PackedDataset(...), batch_size=2, collate_fn=PackedCollator(model))``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packing_core import PackedBatch, pack, plan
from packing_core.batches.columns import TRAINED, read_examples, trained_tokens
from packing_core.batches.documents import segments_by_document
from packing_core.batches.joining import concatenate
from packing_core.batches.marks import MARKS, PER_TOKEN, FlatSegments, counts_through, is_numbered, read_segments
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.batches.views import KernelView
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from packing_core.hints import hinted
from packing_core.planning.cost import cost_of
from packing_core.planning.pieces import positive
from torch_backend.collate.document_labels import LABELS, check_whole, in_order, take_numbers
from torch_backend.collate.shared import pack_shared, sharing
from torch_backend.collate.tokens import EVERY_LABEL, check_first_labels, every_label, masked, with_every_label
from torch_backend.collate.vision import Loss, VisionReader
from torch_backend.seal import SEALED

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
IN_ORDER: dict[str, Any] = {"strategy": "sequential", "seed": None}  # the plan of a batch without a capacity
FULL = 0.7  # rows that are less full than this are worth a warning
ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")  # a config that has one may have a router with a loss
_DTYPES = {"i": np.int64, "u": np.int64, "f": np.float32}  # of columns, as torch makes tensors of lists
_READ_AND_LEFT_OUT = ("segment_ids", "seq_lengths", "packed_seq_lengths")  # no argument of a model


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
            every one that no target is in, from 16 tokens on. ``"auto"`` shares those of 64 and more in batches that
            save a tenth of their work or more by it, where the model can run them and has no dropout. The work of
            segments of n tokens after b tokens of their ancestors is ``a sum(n) + s sum(n (n + 2 b))``: a token and an
            attention pair by ``Cost.from_config(model.config)``. Losses are then computed by ``make_train_step``,
            ``causal_lm_loss`` or ``token_logprobs``.
        processor: of a vision-language model. Features are then examples with images, raw or processed, or rows of a
            ``PackedVisionDataset`` (:class:`torch_backend.collate.vision.VisionReader`). Image tokens are never trained
            and images never cut.
        loss: what is trained of a chat with images, ``"all"`` or the ``"assistant"``'s turns.
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
                f"{idle[0]} has an effect with a capacity alone: without one, all documents of a batch go into one row "
                "as long as they are. Pass PackedCollator(model, capacity, ...)"
            )
        pads = [config.pad_token_id for config in configs if getattr(config, "pad_token_id", None) is not None]
        self.pad_id = int(pads[0]) if pads else 0
        self.marks_padding = _has_router(model)
        self.knows_model = isinstance(model, nn.Module)
        self.labels_every_token = labels_every_token(model)
        self.labels_documents = _labels_documents(model)
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
        return emitted | SEALED

    def pack(self, features: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """The rows of a batch's documents, before they become tensors."""
        per_document: dict[str, Any] = {}
        if self.labels_documents:
            features, per_document = take_numbers(features)
        documents = read_examples(features)
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


class BoundaryCollator:
    """Calls another collator and adds the segments of its batches, read and checked on the host.

    What marks documents and padding is read by :func:`packing_core.batches.marks.read_segments`: ``cu_seq_lens_q``,
    ``seq_lengths``, ``segment_ids``, ``seq_idx``, an ``attention_mask`` of 1, 2, 3, or ``position_ids`` that restart.

    - ``labels`` become -100 at the start of each segment, at padding, and where a mask of trained tokens
      (``completion_mask`` and others) is 0; ``shift_labels`` at the end of each segment.
    - ``attention_mask`` stays, 1 and 0, if there is padding or the model has a router loss; else it is left out.
    - ``position_ids`` stay as they are, also the [3, B, S] of M-RoPE. If there are none, or if they count through
      the whole row, they become 0, 1, 2 in each segment.

    It pickles if the other collator does, so ``DataLoader`` workers may be spawned.
    """

    def __init__(self, collator: Callable[[Any], Mapping[str, Any]], model: Any = None) -> None:
        self.collator = collator
        self.knows_model = isinstance(model, nn.Module)
        self.labels_every_token = labels_every_token(model)
        self.has_router = _has_router(model)

    def __call__(self, features: Any) -> Batch:
        """The collator's batch with ``cu_seq_lens_q``, ``packed_lengths`` and the rest that ``PackedCollator`` emits.

        Raises:
            LayoutError: the batch marks no boundaries, or its marks contradict each other.
        """
        batch = dict(self.collator(features))
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            what = "no input_ids" if ids is None else "input_ids that are no tensor [B, S] with tokens"
            raise LayoutError(f"the collator gave {what}, only {', '.join(batch)}")
        rows = np.arange(len(ids) + 1) * ids.shape[1]
        segments = _segments(batch, ids, rows)
        starts, padding = (torch.from_numpy(x).view(ids.shape) for x in (segments.starts, segments.padding))
        self._check_labels(batch, starts & ~padding, features)
        _mask_labels(batch, torch.zeros_like(starts) if self.labels_every_token else starts, padding)
        mask = batch.pop("attention_mask", None)
        if self.has_router or segments.padding.any():
            batch["attention_mask"] = (~padding).to(torch.int64 if mask is None else mask.dtype)
        positions, added = batch.get("position_ids"), _metadata(segments.lengths, ids.shape)
        if "packed_documents" not in batch:
            real = ~segments.padding[segments.starts]
            added["packed_documents"] = tuple((number,) for number in np.flatnonzero(real).tolist())
        if positions is not None and not _counts_through(positions, segments, rows):
            del added["position_ids"]
        return {"input_ids": ids, **{k: v for k, v in batch.items() if k not in _READ_AND_LEFT_OUT}, **added, **SEALED}

    def _check_labels(self, batch: Batch, starts: Tensor, features: Any) -> None:
        """Raise if the first labels of documents are lost to a model that trains them, here or in the collator."""
        labels = _labels(batch, starts.shape).get("labels")
        if labels is not None and not self.knows_model:
            way_out = "crosspack.with_boundaries(collator, model)"
            check_first_labels(batch["input_ids"], labels, starts, way_out=way_out)
        if labels is None or (self.knows_model and not self.labels_every_token):
            return
        kept = bool((labels[starts] != IGNORE_INDEX).any())
        for example in features if isinstance(features, Sequence) and not kept else ():
            if isinstance(example, Mapping) and example.get("labels") is not None:
                ids, given = np.asarray(example["input_ids"]), np.asarray(example["labels"])
                if ids.shape == given.shape:
                    way_out = "crosspack.PackedCollator(model) keeps them, and this collator leaves them out"
                    check_first_labels(ids, given, np.arange(len(ids)) == 0, way_out=way_out)


def with_boundaries(collator: Callable[[Any], Mapping[str, Any]], model: Any = None) -> Callable[[Any], Batch]:
    """Wraps ``collator`` to add the segments of its batches, read from any of the marks it makes.

    A collator whose batches carry segments already, one of this package, is returned as it is.

    Args:
        collator: returns a mapping with ``input_ids`` [B, S] and some mark of its documents.
        model: a token classifier keeps the labels of its documents' first tokens, and a model with a router loss gets
            an ``attention_mask`` in every batch.

    >>> ids = torch.tensor([[5, 6, 7, 8, 9]])
    >>> batch = with_boundaries(dict)({"input_ids": ids, "seq_lengths": [[3, 2]]})
    >>> batch["cu_seq_lens_q"].tolist(), batch["packed_lengths"]
    ([0, 3, 5], (3, 2))

    See :class:`BoundaryCollator`, which raises ``LayoutError`` when it is called and the batch marks no boundaries, or
    contradicts itself.
    """
    return collator if isinstance(collator, PackedCollator | BoundaryCollator) else BoundaryCollator(collator, model)


def _has_router(model: Any) -> bool:
    """Returns whether the model routes tokens to experts, or may have an auxiliary loss: both leave padding out."""
    if any(hasattr(config, field) for config in _configs(model) for field in ROUTER_LOSS):
        return True
    if not isinstance(model, nn.Module):
        return False
    from torch_backend.hf.anatomy.experts import find_experts

    return bool(find_experts(model))


def labels_every_token(model: Any) -> bool:
    """Returns whether the model classifies tokens; a collator may be used where transformers is not installed."""
    if not isinstance(model, nn.Module):
        return False
    from torch_backend.hf.anatomy.heads import trains_first_token

    return trains_first_token(model)


def _labels_documents(model: Any) -> bool:
    """Returns whether a model classifies documents."""
    if not isinstance(model, nn.Module):
        return False
    from torch_backend.hf.anatomy.heads import labels_documents

    return labels_documents(model)


def _to_torch(view: KernelView, rows: int) -> Batch:
    def tensor(array: NDArray[Any], dtype: Any = None) -> Tensor:
        return torch.from_numpy(np.array(array, dtype)).view(rows, -1)

    cu_seqlens = torch.from_numpy(view.cu_seqlens.copy())
    return {
        "input_ids": tensor(view.input_ids, np.int64),
        "labels": tensor(view.targets, np.int64),
        "position_ids": tensor(view.position_ids, np.int64),
        "seq_idx": tensor(view.seq_idx),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": view.max_seqlen,
        "max_length_k": view.max_seqlen,
        "packed_lengths": view.lengths,
        **({} if view.parents is None else {"packed_parents": view.parents}),
        **{name: tensor(array, _DTYPES.get(array.dtype.kind)) for name, array in view.columns.items()},
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
    return {"packed_documents": tuple(tuple(piece.tolist()) for piece in pieces)}


def _metadata(lengths: NDArray[np.int64], shape: torch.Size) -> Batch:
    cu_seqlens = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return {
        "position_ids": torch.from_numpy(positions).view(shape),
        "seq_idx": torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)).view(shape),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
        "packed_lengths": tuple(lengths.tolist()),
    }


def _segments(batch: Batch, ids: Tensor, rows: NDArray[np.int64]) -> FlatSegments:
    """The segments of a batch with rows of tokens."""
    marks = {name: batch[name] for name in MARKS if batch.get(name) is not None}
    marks |= {name: _flat(name, marks[name], ids.shape) for name in PER_TOKEN if name in marks}
    if marks.keys() <= {"attention_mask"} and not is_numbered(marks.get("attention_mask")):
        raise LayoutError(
            "the batch marks no boundaries: with_boundaries reads cu_seq_lens_q, seq_lengths, segment_ids, seq_idx, an "
            f"attention_mask of segment numbers or position_ids that restart, and the collator gave {', '.join(batch)}"
        )
    predicts = np.zeros(ids.shape, np.bool_)
    if "labels" in (labels := _labels(batch, ids.shape)):
        predicts[:, :-1] |= np.asarray(labels["labels"][:, 1:]) != IGNORE_INDEX
    if "shift_labels" in labels:
        predicts |= np.asarray(labels["shift_labels"]) != IGNORE_INDEX
    tokens = np.asarray(ids).reshape(-1)
    return read_segments(marks, rows, tokens=tokens, needed=predicts.reshape(-1))


def _labels(batch: Batch, shape: torch.Size) -> dict[str, Tensor]:
    """The labels of a batch that are per token; ``shift_labels`` hold at each token the label of the next one."""
    found = {name: batch.get(name) for name in ("labels", "shift_labels")}
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.shape == shape}


def _flat(name: str, value: Any, shape: torch.Size) -> NDArray[Any]:
    """A value per token, flattened; positions of several axes become [axes, tokens]."""
    if not hasattr(value, "shape"):
        raise LayoutError(f"{name} is a {type(value).__name__}: with_boundaries takes a tensor [B, S]")
    array = np.asarray(value)
    if name == "position_ids" and array.ndim == 3 and array.shape[1:] == shape and len(array) in (3, 4):
        return array.reshape(len(array), -1)
    if array.shape != shape:
        raise LayoutError(
            f"{name} has shape {list(array.shape)} and input_ids {list(shape)}: with_boundaries can check it against "
            "the documents only if it has one value per token, so let the collator leave it out"
        )
    return array.reshape(-1)


def _mask_labels(batch: Batch, starts: Tensor, padding: Tensor) -> None:
    """Take out the labels that no token of their segment predicts, and those that are not trained."""
    masks = {name: _flat(name, batch[name], starts.shape) for name in TRAINED if batch.get(name) is not None}
    trained = trained_tokens(masks)
    ignored = starts | padding
    if trained is not None:
        ignored = ignored | torch.from_numpy(~trained).view(starts.shape)
    for name, labels in _labels(batch, starts.shape).items():
        where = ignored if name == "labels" else ignored.flatten().roll(-1).view(starts.shape)
        batch[name] = labels.masked_fill(where, IGNORE_INDEX)


def _counts_through(positions: Tensor, segments: FlatSegments, rows: NDArray[np.int64]) -> bool:
    return positions.ndim == 2 and counts_through(np.asarray(positions).reshape(-1), segments, rows)


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
    return _configs(model)


def _configs(model: Any) -> list[Any]:
    """The configuration of a model inside any wrappers, and the one of its text model."""
    while getattr(model, "config", None) is None and hasattr(model, "module"):
        model = model.module
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return [found for found in (config, text) if found is not None]
