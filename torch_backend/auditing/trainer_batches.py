"""Reads the first batches of a trainer, and finds in their rows the documents that its collator was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core import PackedBatch
from packing_core.batches.columns import READ, documents_of
from packing_core.errors import LayoutError
from torch_backend.auditing.images import rows_with_images
from torch_backend.auditing.scored import without_workers
from torch_backend.collate import Batch
from torch_backend.collate.vision import VisionRows
from torch_backend.known_rows import refuse_lost_lengths


def _flat(features: Any) -> list[Any]:
    """Returns the features of a batch; those of a row that is a list of documents one by one."""
    return [x for each in features for x in (each if isinstance(each, list) else [each])]


def first_batches(trainer: Any, count: int) -> Iterator[tuple[Batch, list[Any]]]:
    """The first batches of the trainer's own dataloader, on its device, each with what its collator was given."""
    collator, seen = trainer.data_collator, []

    def recorded(features: Any) -> Any:
        rows = rows_with_images(collator, features)
        seen.append(_flat(features) if rows is None else [rows])
        return collator(features if rows is None else rows)

    trainer.data_collator = recorded
    try:
        with without_workers(trainer):
            found = [batch for _, batch in zip(range(count), iter(trainer.get_train_dataloader()), strict=False)]
    finally:
        trainer.data_collator = collator
    for features in seen:
        refuse_lost_lengths(features, f"example of {type(trainer).__name__}", trainer.train_dataset)
    for batch, features in zip(found, seen, strict=False):
        yield dict(trainer._prepare_inputs(dict(batch))), features


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
