"""Reads the first batch of a trainer, and finds in its rows the documents that its collator was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core import PackedBatch
from packing_core.batches.columns import READ, documents_of
from packing_core.errors import LayoutError, PackingError
from torch_backend.auditing.images import rows_with_images
from torch_backend.collate import Batch, call_on_copies
from torch_backend.collate.packed_dataset import refuse_lost_lengths
from torch_backend.collate.vision import VisionRows
from torch_backend.hf.anatomy.structure import with_values

ONE_DOCUMENT = "the trainer's first batch holds one document: raise its batch size to audit packing"


def _flat(features: Any) -> list[Any]:
    """Returns the features of a batch; those of a row that is a list of documents one by one."""
    return [x for each in features for x in (each if isinstance(each, list) else [each])]


def first_batch(trainer: Any) -> tuple[Batch, list[Any]]:
    """Returns the first batch of the trainer's own dataloader, on its device, and what its collator was given."""
    collator, seen = trainer.data_collator, []

    def recorded(features: Any) -> Any:
        rows = rows_with_images(collator, features)
        seen.append(_flat(features) if rows is None else [rows])
        return call_on_copies(collator, features if rows is None else rows)

    with with_values([(trainer, "data_collator", recorded)]):
        batch = first_of_dataloader(trainer)
    if not seen:
        raise PackingError(
            f"the dataloader of {type(trainer).__name__} does not call its data_collator, so nothing says which "
            "documents a row holds: audit its model, audit(trainer.model)"
        )
    for features in seen:
        refuse_lost_lengths(features, f"example of {type(trainer).__name__}", trainer.train_dataset)
    return dict(trainer._prepare_inputs(dict(batch))), seen[0]


def first_of_dataloader(trainer: Any) -> Any:
    """Returns what a trainer's dataloader gives first, read in this process.

    Raises:
        PackingError: it gives nothing.
    """
    none = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    with with_values((trainer.args, f"dataloader_{name}", value) for name, value in none.items()):
        batch = next(iter(trainer.get_train_dataloader()), None)
    if batch is None:
        raise PackingError(
            f"the training data fill no batch of {type(trainer).__name__}: pass more of them, or a smaller batch size"
        )
    return batch


def pieces_of(feature: Any) -> list[NDArray[np.int64]]:
    """Splits a feature into documents at its own boundaries; without any, it is one document."""
    if isinstance(feature, VisionRows):
        feature = feature.batch
    if isinstance(feature, PackedBatch):
        flat, starts = feature.input_ids.reshape(-1), feature.flat_starts
        return [np.asarray(flat[a : a + n], np.int64) for a, n in zip(starts, feature.lengths, strict=True)]
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        raise LayoutError(
            "the trainer's collator is given features without input_ids, which cannot be audited: tokenise the data set"
        )
    read = {name: feature[name] for name in ("input_ids", *READ) if name in feature}  # others may be one number each
    return [np.asarray(document["input_ids"], np.int64) for document in documents_of(read)]


def places_of(documents: list[NDArray[np.int64]], rows: NDArray[np.int64]) -> list[tuple[int, slice]]:
    """Row and tokens of every document; two equal documents get a place each."""
    rows = np.ascontiguousarray(rows, np.int64)
    text, free = [row.tobytes() for row in rows], np.ones(rows.shape, np.bool_)
    places = []
    for number, document in enumerate(documents):
        wanted = document.tobytes()
        place = next(_free_places(text, wanted, free), None)
        if place is None:
            raise LayoutError(
                f"document {number} of the batch, {len(document):,} tokens, is not in the collator's rows as it was "
                "given: the audit compares whole documents, so let the dataset hold what is trained"
            )
        free[place] = False
        places.append(place)
    return places


def _free_places(text: list[bytes], wanted: bytes, free: NDArray[np.bool_]) -> Iterator[tuple[int, slice]]:
    for row, tokens in enumerate(text):
        at = tokens.find(wanted)
        while at >= 0:
            place = slice(at // 8, (at + len(wanted)) // 8)
            if at % 8 == 0 and free[row, place].all():
                yield row, place
            at = tokens.find(wanted, at + 1)
