"""Packed rows as a ``datasets.Dataset``, for trainers that take nothing else.

A tokenised ``datasets.Dataset`` -> :func:`pack_dataset` -> one of packed rows, which TRL's and this project's collators
cut into documents again by their ``seq_lengths``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packing_core import PackedDataset
from packing_core.columns import READ, read_columns
from packing_core.errors import LayoutError
from packing_core.extras import require

ROWS_AT_ONCE = 1024


def pack_dataset(dataset: Any, capacity: int, **plan_options: Any) -> Any:
    """Pack a whole tokenised dataset into rows, for trainers that insist on a ``datasets.Dataset``.

    One plan covers all documents, so rows are as full as they can be; ``PackedCollator(capacity=...)`` can only pack
    the documents of one batch together.

    Args:
        dataset: a ``datasets.Dataset`` with ``input_ids``, and optionally the columns by which
            :func:`packing_core.columns.read_columns` knows what is trained (``labels``, ``completion_mask``,
            ``prompt_length`` and others), what is padding (``attention_mask``) and where documents begin
            (``seq_lengths`` and others). All other columns are left out.
        capacity: tokens a row can hold.
        plan_options: ``overflow``, ``strategy``, ``seed`` and the other options of ``packing_core.plan``.

    Returns:
        A ``datasets.Dataset`` of packed rows without padding: ``input_ids``, ``labels`` (-100 at segment starts) and
        ``seq_lengths``, as TRL's own collator reads them under ``SFTConfig(padding_free=True, max_length=None)``.

    Raises:
        LayoutError: there is no ``input_ids``, or columns contradict each other.
        PackingError: what ``packing_core.plan`` and ``packing_core.pack`` raise.
    """
    datasets = require("datasets", extra="hf")
    if "input_ids" not in dataset.column_names:
        raise LayoutError(f"the dataset has no input_ids, only {', '.join(dataset.column_names)}: tokenise it first")
    names = [name for name in dataset.column_names if name in ("input_ids", "labels", *READ)]
    arrow = dataset.select_columns(names).with_format("arrow")[:]
    documents = read_columns({name: arrow[name] for name in names})
    packed = PackedDataset(
        documents.input_ids,
        capacity,
        labels=documents.labels,
        loss_mask=documents.loss_mask,
        prompt_lengths=documents.prompt_lengths,
        **plan_options,
    )

    def rows() -> Iterator[dict[str, Any]]:
        for first in range(0, len(packed), ROWS_AT_ONCE):
            columns = packed[first : first + ROWS_AT_ONCE].to_dict("trl")
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    numbers = datasets.List(datasets.Value("int64"))
    features = datasets.Features({"input_ids": numbers, "labels": numbers, "seq_lengths": numbers})
    return datasets.Dataset.from_list(list(rows()), features=features)
