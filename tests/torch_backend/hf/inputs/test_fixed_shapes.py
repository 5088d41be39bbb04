"""Batches widened to fixed shapes: a graph sees one form, and no document changes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torch_backend.models import collate, documents, patched
from torch_backend.steps import cuda_graph as captured
from torch_backend.steps.fixed_shapes import FixedShapes


@pytest.mark.parametrize("rows", [1, 2])
def test_fixed_shapes_change_no_document(rows: int) -> None:
    """Two rows of 64 with one row of padding appended, or one row of 128 with 32 tokens of padding at its end."""
    lengths, tokens = ((40, 20, 40), 160) if rows == 1 else ((40, 20), None)
    fixed = FixedShapes(tokens)
    fixed(collate(documents((60, 60, 3)), capacity=64 if rows == 2 else 128))
    batch = collate(documents(lengths), capacity=64 if rows == 2 else 128)
    wide = fixed(batch)
    assert wide["input_ids"].shape == ((1, 160) if rows == 1 else (2, 64))
    assert wide["max_length_q"] == 64 and len(wide["cu_seq_lens_q"]) == 17
    assert wide["cu_seq_lens_q"][-1] == sum(wide["packed_lengths"]) == wide["input_ids"].numel()
    model = patched()
    torch.testing.assert_close(model(**wide).loss, model(**batch).loss)
    assert captured.form_of(fixed(batch)) == captured.form_of(wide)


@given(
    rows=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    more=st.sampled_from([0, 0, 1, 9, 30]),
    first=st.tuples(st.integers(1, 40), st.integers(1, 4)),
)
def test_padding_is_whole_segments_whatever_the_rows(rows: list[list[int]], more: int, first: tuple[int, int]) -> None:
    """Numbers and positions of all tokens follow from the lengths; no segment crosses rows or is too long."""
    width = max(map(sum, rows))
    lengths = [n for row in rows for n in (*row, *[width - sum(row)] * (sum(row) < width))]
    ids = torch.arange(len(rows) * width).view(len(rows), width)
    fixed = FixedShapes(width + more if len(rows) == 1 else None, *first)
    if first[1] > len(rows) and not more:  # then rows are padding
        fixed(packed_row(torch.zeros(first[1], width, dtype=torch.long), [width] * first[1]))
    wide = fixed(packed_row(ids, lengths))
    after = np.array(wide["packed_lengths"])
    ends = after.cumsum()
    assert ends[-1] == wide["input_ids"].numel() and list(after[: len(lengths)]) == lengths
    row_length = wide["input_ids"].shape[1]
    assert all(start // row_length == (end - 1) // row_length for start, end in zip(ends - after, ends, strict=True))
    assert after.max() <= wide["max_length_q"]
    np.testing.assert_array_equal(wide["cu_seq_lens_q"][: len(ends) + 1], [0, *ends])
    np.testing.assert_array_equal(wide["position_ids"].flatten(), np.concatenate([np.arange(n) for n in after]))
    np.testing.assert_array_equal(wide["seq_idx"].flatten(), np.repeat(np.arange(len(after)), after))


def packed_row(ids: torch.Tensor, lengths: list[int]) -> dict[str, Any]:
    """A packed batch of segments of these lengths."""
    of_token = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths).reshape(ids.shape)
    positions = np.concatenate([np.arange(n) for n in lengths]).reshape(ids.shape)
    return {
        "input_ids": ids,
        "position_ids": torch.from_numpy(positions),
        "seq_idx": torch.from_numpy(of_token),
        "packed_lengths": tuple(lengths),
        "cu_seq_lens_q": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "max_length_q": max(lengths),
    }
