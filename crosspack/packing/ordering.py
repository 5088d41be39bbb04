"""``--order`` and ``--equal-cost``: the documents of all units in, the rows of one plan in the order of training out.

The plan needs the length and the key of every document, a few bytes each. Tokens are read for about a gigabyte of rows
at a time: each time the units' files that these rows draw on, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crosspack.encoding.keys import as_numbers
from crosspack.packing.row_files import Rows, joined
from crosspack.packing.unit import KEY, Rules
from packing_core.planning.epochs import plan_steps
from packing_core.planning.packplan import PackPlan
from packing_core.planning.plan import plan

TOGETHER = 1 << 26  # tokens of the rows that are made at a time


def planned_rows(files: Sequence[Path], rules: Rules) -> Iterator[Rows]:
    """Yields the rows in the order of training, some at a time.

    Args:
        files: the documents that units handed on, in the order of the input.
    """
    outlines = [Rows.outline(path) for path in files]
    lengths = [segments for segments, _ in outlines]
    made = _plan(np.concatenate(lengths), [values for _, values in outlines], rules)
    first = np.cumsum([0, *map(len, lengths)])
    upto = np.cumsum(made.row_tokens)
    blocks = np.flatnonzero(np.diff(upto // TOGETHER, prepend=-1))
    for begin, end in zip(blocks, [*blocks[1:], made.n_rows], strict=True):
        counts = np.diff(made.row_offsets[begin : end + 1])
        wanted = made.source[made.row_offsets[begin] : made.row_offsets[end]]
        yield _gathered(files, first, wanted).take(np.argsort(np.argsort(wanted)), counts)


def _plan(lengths: Any, values: Sequence[Mapping[str, Any]], rules: Rules) -> PackPlan:
    """The rows of all documents, whose values the units kept."""
    if rules.equal_step is not None:
        return plan_steps(lengths, rules.rows, rules.equal_step, seed=rules.seed)
    keys = None if rules.rows.keys is None else [key for of_unit in values for key in of_unit[KEY]]
    if keys is not None and rules.rows.order == "sorted":
        keys = as_numbers(keys)
    return plan(lengths, replace(rules.rows, keys=keys), seed=rules.seed)


def _gathered(files: Sequence[Path], first: Any, wanted: Any) -> Rows:
    """The wanted documents by rising number."""
    ordered = np.sort(wanted)
    unit = np.searchsorted(first, ordered, side="right") - 1
    parts = []
    for number in np.unique(unit).tolist():
        own = ordered[unit == number] - first[number]
        part = Rows.load(files[number]).take(own, np.ones(len(own), np.int64))
        part.values.pop(KEY, None)
        parts.append(part)
    return joined(parts)
