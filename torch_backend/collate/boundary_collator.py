"""`BoundaryCollator`: reads the documents of another collator's batches and adds what a patched model needs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packing_core.batches.columns import TRAINED, trained_tokens
from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import (
    LENGTHS,
    MARKS,
    PER_TOKEN,
    FlatSegments,
    counts_through,
    is_numbered,
    read_segments,
    refuse_trained_padding,
)
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError
from torch_backend.collate.model_traits import has_router, labels_every_token
from torch_backend.collate.packed_collator import Batch, PackedCollator, segment_keys
from torch_backend.collate.tokens import check_first_labels
from torch_backend.packed_tokens import NOWHERE, packed_tokens, plain

_READ_AND_LEFT_OUT = ("segment_ids", "seq_lengths", "packed_seq_lengths")  # no argument of a model


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
        self.has_router = has_router(model)

    def __call__(self, features: Any) -> Batch:
        """The collator's batch with ``cu_seq_lens_q``, ``packed_lengths`` and the rest that ``PackedCollator`` emits.

        Raises:
            LayoutError: the batch marks no boundaries, or its marks contradict each other.
        """
        batch = plain(call_on_copies(self.collator, features))
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            what = "no input_ids" if ids is None else "input_ids that are no tensor [B, S] with tokens"
            raise LayoutError(f"the collator gave {what}, only {', '.join(batch)}")
        rows = np.arange(len(ids) + 1) * ids.shape[1]
        segments = _segments(batch, ids, rows)
        _check_documents(segments, features)
        starts, padding = (torch.from_numpy(x).view(ids.shape) for x in (segments.starts, segments.padding))
        self._check_labels(batch, starts & ~padding, features)
        _mask_labels(batch, torch.zeros_like(starts) if self.labels_every_token else starts, padding)
        mask = batch.pop("attention_mask", None)
        if self.has_router or segments.padding.any():
            batch["attention_mask"] = (~padding).to(torch.int64 if mask is None else mask.dtype)
        positions, added = batch.get("position_ids"), _metadata(segments.lengths, ids.shape)
        if BatchKey.DOCUMENTS not in batch:
            real = ~segments.padding[segments.starts]
            added[BatchKey.DOCUMENTS] = tuple((number,) for number in np.flatnonzero(real).tolist())
        if positions is not None and not _counts_through(positions, segments, rows):
            del added["position_ids"]
        kept = {name: value for name, value in batch.items() if name not in _READ_AND_LEFT_OUT}
        tokens = packed_tokens(ids, added[BatchKey.NUMBERS].masked_fill(padding, NOWHERE))
        return {**kept, **added, "input_ids": tokens}

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
    if isinstance(collator, nn.Module) or not callable(collator):
        raise PackingError(
            f"with_boundaries takes a collator first and got a {type(collator).__name__}: pass "
            "with_boundaries(collator, model)"
        )
    return collator if isinstance(collator, PackedCollator | BoundaryCollator) else BoundaryCollator(collator, model)


def call_on_copies(collator: Callable[[Any], Any], features: Any) -> Any:
    """Returns the collator's batch; it may pop columns of the examples and change their lists, as many do."""
    if not isinstance(features, list | tuple):
        return collator(features)
    return collator([_copied(feature) for feature in features])


def _copied(feature: Any) -> Any:
    if not isinstance(feature, MutableMapping):
        return feature
    copied = copy(feature)
    copied.update({name: list(value) for name, value in feature.items() if type(value) is list})
    return copied


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


def _check_documents(segments: FlatSegments, features: Any) -> None:
    """Raise if the examples say that they hold several documents, and the batch joins them."""
    examples = features if isinstance(features, Sequence) else ()
    marked = [next((x[name] for name in LENGTHS if name in x), None) for x in examples if isinstance(x, Mapping)]
    lengths = [int(n) for given in marked if given is not None for n in np.atleast_1d(np.asarray(given))]
    found = segments.documents
    if len(lengths) > len(found) and sum(lengths) == found.sum():
        raise LayoutError(
            f"the examples hold {len(lengths)} documents by their lengths, and the collator marks {len(found)} in as "
            "many tokens: let it hand on the lengths, or use crosspack.PackedCollator(model), which reads them"
        )


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
    mask = batch.get("attention_mask")
    masked = np.zeros(starts.numel(), np.bool_) if mask is None else np.asarray(mask).reshape(-1) == 0
    masked &= True if trained is None else trained.reshape(-1)
    for name, labels in _labels(batch, starts.shape).items():
        lost = masked if name == "labels" else np.append(masked[1:], False)
        place = f"token {{}} of the batch, by its {name},".format
        refuse_trained_padding(np.asarray(labels).reshape(-1), lost, place)
        where = ignored if name == "labels" else ignored.flatten().roll(-1).view(starts.shape)
        batch[name] = labels.masked_fill(where, IGNORE_INDEX)


def _counts_through(positions: Tensor, segments: FlatSegments, rows: NDArray[np.int64]) -> bool:
    return positions.ndim == 2 and counts_through(np.asarray(positions).reshape(-1), segments, rows)


def _metadata(lengths: NDArray[np.int64], shape: torch.Size) -> Batch:
    cu_seqlens = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    numbers = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)).view(shape)
    keys = segment_keys(cu_seqlens, numbers, int(lengths.max()), tuple(lengths.tolist()))
    return {"position_ids": torch.from_numpy(positions).view(shape), **keys}
