"""Packed rows as a ``datasets.Dataset``, for trainers that take nothing else.

A tokenised ``datasets.Dataset`` -> :func:`pack_dataset` -> one of packed rows, which TRL's and this project's collators
cut into documents again by their ``seq_lengths``. Everything is Arrow: lengths are read from offsets, and tokens are
copied once, from the buffers of the dataset into those of the rows, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from packing_core import PackedBatch, PackedDataset, PackPlan, plan
from packing_core.batches.columns import documents_in
from packing_core.batches.marks import LENGTHS
from packing_core.errors import LayoutError
from packing_core.extras import require
from packing_core.hints import hinted
from packing_core.storage.segment_indexing import offsets_of
from packing_core.training.files import written_beside
from torch_backend.collate import labels_every_token
from torch_backend.collate.packed_dataset import LOST_LENGTHS, PACKED_DESCRIPTION, is_packed_dataset
from torch_backend.collate.tokens import check_first_labels, every_label

BLOCK_TOKENS = 1 << 20  # tokens copied and written at a time, in whole rows
RULES = 3  # raise it whenever the same arguments give other rows, so that no cached file of before is read


@hinted(plan)
def pack_dataset(dataset: Any, capacity: int, *, labels: bool = True, model: Any = None, **plan_options: Any) -> Any:
    """Pack a whole tokenised dataset into rows, for trainers that insist on a ``datasets.Dataset``.

    One plan covers all documents, so rows are as full as they can be; ``PackedCollator(capacity=...)`` can only pack
    the documents of one batch together. As with ``datasets.map``, the rows of a dataset that lies in files are written
    to a cache file beside them, named by a fingerprint, and the same call reads them again; those of a dataset in
    memory stay in memory.

    Args:
        dataset: a ``datasets.Dataset`` with ``input_ids``, and optionally the columns by which
            :func:`packing_core.batches.columns.read_columns` knows what is trained (``labels``, ``completion_mask``,
            ``prompt_length`` and others), what is padding (``attention_mask``) and where documents begin
            (``seq_lengths`` and others). All other columns are left out.
        capacity: tokens a row can hold.
        labels: False leaves out the labels, which take as much memory as the tokens, for collators that make them of
            tokens and ``seq_lengths``: TRL's and this project's. Only where every token is trained.
        model: that the rows are for. Only token classifiers and masked language models need it: they train the label
            of a document's first token, which is -100 for every other model.
        plan_options: ``overflow``, ``strategy``, ``seed`` and the other options of ``packing_core.plan``.

    ``enable_packing``, ``audit`` of a trainer and this function raise for rows without their ``seq_lengths``. They know
    them by the ``info.description`` of the data set; a model that gets such rows runs each as one document.

    Returns:
        A ``datasets.Dataset`` of packed rows without padding: ``input_ids`` in the dtype they have, ``labels`` (-100 at
        segment starts) and ``seq_lengths``, as TRL's own collator reads them under
        ``SFTConfig(padding_free=True, max_length=None)``.

    Raises:
        LayoutError: there is no ``input_ids``, they are rows of this function without their lengths, columns contradict
            each other, a document's first token has a label other than itself and no ``model`` says that it is
            trained, or the dataset says what is trained and ``labels=False`` would forget it.
        PackingError: what ``packing_core.plan`` and ``packing_core.pack`` raise.
    """
    datasets = require("datasets", extra="hf")
    if not isinstance(dataset, datasets.Dataset):
        way = "convert it by datasets.Dataset.from_list" if isinstance(dataset, list | tuple) else "choose one split"
        way = "use crosspack.stream" if isinstance(dataset, datasets.IterableDataset) else way
        raise LayoutError(f"pack_dataset takes a datasets.Dataset, and this is a {type(dataset).__name__}: {way}")
    if len(dataset) == 0:
        raise LayoutError("the dataset is empty: there is nothing to pack")
    if "input_ids" not in dataset.column_names:
        raise LayoutError(f"the dataset has no input_ids, only {', '.join(dataset.column_names)}: tokenise it first")
    if is_packed_dataset(dataset) and not any(name in dataset.column_names for name in LENGTHS):
        raise LayoutError(f"the dataset {LOST_LENGTHS}")
    options = {"capacity": capacity, **plan_options}
    every_token = labels_every_token(model)
    make = partial(_targets, model_known=model is not None, every_token=every_token) if labels else None
    kind = {"labels": labels, "model known": model is not None, "every token": every_token}
    fingerprint = datasets.fingerprint.update_fingerprint(
        dataset._fingerprint, f"crosspack.pack_dataset {RULES}", {**options, **kind}
    )
    if not dataset.cache_files:
        table = require("pyarrow", extra="hf").Table.from_batches(_rows(dataset, options, make))
        rows = datasets.Dataset(datasets.table.InMemoryTable(table), split=dataset.split, fingerprint=fingerprint)
        return _described(rows)
    path = Path(dataset._get_cache_file_path(fingerprint))
    if not path.exists():
        pa, batches = require("pyarrow", extra="hf"), _rows(dataset, options, make)
        first = next(batches)
        with (
            written_beside(path) as file,
            pa.OSFile(str(file), "wb") as sink,
            pa.ipc.new_stream(sink, first.schema) as stream,
        ):
            for batch in chain([first], batches):
                stream.write_batch(batch)
    rows = datasets.Dataset.from_file(str(path), split=dataset.split)
    rows._fingerprint = fingerprint
    return _described(rows)


def _described(rows: Any) -> Any:
    """The rows, which say that they are packed."""
    rows.info.description = PACKED_DESCRIPTION
    return rows


def _rows(dataset: Any, options: dict[str, Any], targets: Callable[[PackedBatch], Any] | None) -> Iterator[Any]:
    """Arrow record batches of packed rows, all of one schema.

    The rows of a batch are made as a single row that is as long as all of them, which has no padding to take out.
    """
    datasets, pa = require("datasets", extra="hf"), require("pyarrow", extra="hf")
    documents = documents_in(dataset)
    assert documents is not None, "it is a datasets.Dataset"
    said = (documents.labels, documents.loss_mask, documents.prompt_lengths)
    if targets is None and any(x is not None for x in said):
        raise LayoutError(
            "the dataset says which tokens are trained, and rows without labels would train all: leave labels=False out"
        )
    rows = plan(documents.input_ids.lengths, **options)
    at_once = max(1, BLOCK_TOKENS // rows.capacity)
    firsts = np.append(np.arange(0, rows.n_rows, at_once), rows.n_rows)
    blocks = PackPlan(
        rows.row_offsets[firsts],
        rows.source,
        rows.start,
        rows.length,
        capacity=at_once * rows.capacity,
        n_documents=rows.n_documents,
        context=rows.context,
        restarts=rows.restarts,
        check=False,
    )
    packed = PackedDataset(documents, blocks)

    schema = None
    for number, (first, end) in enumerate(pairwise(firsts.tolist())):
        block = packed[number]
        tokens = offsets_of(rows.row_tokens[first:end])
        segments = rows.row_offsets[first : end + 1] - rows.row_offsets[first]
        columns = {
            "input_ids": (tokens, block.input_ids[0, : block.n_tokens]),
            **({} if targets is None else {"labels": (tokens, targets(block)[0, : block.n_tokens])}),
            "seq_lengths": (segments, block.lengths),
        }
        arrays = [pa.ListArray.from_arrays(pa.array(a, pa.int32()), pa.array(x)) for a, x in columns.values()]
        if schema is None:
            kinds = {name: datasets.List(datasets.Value(str(x.dtype))) for name, (_, x) in columns.items()}
            schema = datasets.Features(kinds).arrow_schema
        yield pa.record_batch(arrays, schema=schema)


def _targets(block: PackedBatch, *, model_known: bool, every_token: bool) -> Any:
    """The labels of a block [1, capacity], -100 at segment starts unless the model trains those too."""
    if every_token:
        return every_label(block)
    if not model_known and block.labels is not None:
        way_out = "crosspack.pack_dataset(dataset, capacity, model=model)"
        check_first_labels(block.input_ids, every_label(block), block.boundaries, way_out=way_out)
    return block.targets
