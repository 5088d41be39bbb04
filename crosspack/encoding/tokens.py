"""Records that hold token ids: checked, and cut into their documents by the rule that collators and datasets follow.

``input_ids`` may be a document or a packed row, and what marks documents, padding and trained tokens is what
``packing_core.batches.columns`` reads. Here every column must be of whole numbers in range, since a file can hold
anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.columns import PROMPT, READ, TRAINED, read_examples
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import CapacityError, PackingError
from packing_core.training.schedule import EncodedDocument

COLUMNS = ("input_ids", "labels", *READ)
_LARGEST = np.iinfo(np.int32).max


def token_documents(
    record: Mapping[str, Any], where: str, carried: Mapping[str, Any]
) -> Iterator[tuple[EncodedDocument, dict[str, NDArray[Any]]]]:
    """The documents of a record; a column that is null counts as absent.

    Args:
        carried: other columns by name; those with one number per token are returned with each document.

    Raises:
        PackingError: a column is not of whole numbers, or they contradict each other.
    """
    columns = {name: _numbers(record[name], name, where) for name in COLUMNS if record.get(name) is not None}
    ids = columns["input_ids"]
    if not len(ids):
        yield EncodedDocument(ids.astype(np.int32), np.zeros(0, np.bool_)), {}
        return
    if (outside := (ids < 0) | (ids > _LARGEST)).any():
        raise PackingError(f"{where}: input_ids has {ids[outside][0]}: a token id is 0 to {_LARGEST:,}")
    extra = {name: array for name, value in carried.items() if (array := _per_token(value, len(ids))) is not None}
    for name in TRAINED:
        if name in columns and not np.isin(columns[name], (0, 1)).all():
            raise PackingError(f"{where}: {name} has values other than 0 and 1: 1 marks a trained token")
    try:
        read = read_examples([columns | extra])
    except PackingError as error:
        raise PackingError(f"{where}: {error}") from error
    for number, document in enumerate(read.input_ids):
        trained = np.ones(len(document), np.bool_)
        if read.labels is not None:
            labels = read.labels[number]
            trained = labels != IGNORE_INDEX
            if (trained & (labels != document)).any():
                raise PackingError(f"{where} has labels that are neither its input_ids nor -100: unshift them")
        if read.loss_mask is not None:
            trained = trained & read.loss_mask[number]
        if read.prompt_lengths is not None:
            prompt = int(read.prompt_lengths[number])
            if not 0 <= prompt <= len(document):
                raise PackingError(f"{where}: {PROMPT} is {prompt} and the document has {len(document):,} tokens")
            trained = trained & (np.arange(len(document)) >= prompt)
        yield EncodedDocument(document.astype(np.int32), trained), {name: read.columns[name][number] for name in extra}


def _per_token(value: Any, tokens: int) -> NDArray[Any] | None:
    """A column of numbers, one for each token; None of anything else."""
    if not isinstance(value, list | np.ndarray) or len(value) != tokens:
        return None
    array = np.asarray(value)
    return array if array.ndim == 1 and array.dtype.kind in "biuf" else None


def _numbers(value: Any, name: str, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of several lengths
        array = np.asarray(None)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.dtype.kind not in "biu" or array.ndim > 1 or (array.ndim == 0 and name != PROMPT):
        raise PackingError(f"{where}: {name} is not a list of whole numbers of at most 64 bits")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise PackingError(f"{where}: {name} has {array.max()}, which does not fit 64 bits with a sign")
    return array.astype(np.int64)


def check_entries(where: str, documents: Iterable[EncodedDocument], entries: int) -> None:
    """Raise PackingError if a token id is none of a tokenizer's."""
    largest = max((int(document.ids.max()) for document in documents if len(document.ids)), default=0)
    if largest >= entries:
        raise PackingError(
            f"{where}: input_ids has {largest:,} and the tokenizer {entries:,} entries: pass the --tokenizer that "
            "made them"
        )


def check_length(where: str, document: EncodedDocument, capacity: int) -> None:
    """Raise CapacityError if a document is longer than a row."""
    if len(document.ids) > capacity:
        raise CapacityError(
            f"{where}: a document has {len(document.ids):,} tokens and capacity is {capacity:,}: "
            f"pass --overflow split, truncate or drop, or raise --capacity"
        )
