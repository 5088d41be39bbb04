"""Batches widened to fixed shapes: a graph sees one form, and no document changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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


def test_rows_of_padding_hold_whole_segments() -> None:
    """Three rows of 80 after one: padding is cut into segments of at most 64, none of which may cross rows."""
    fixed = FixedShapes(80)
    fixed(collate(documents((70, 50, 60)), capacity=80))
    batch = collate(documents((33,)), capacity=72)
    own = batch["packed_lengths"]
    batch["seq_idx"] = torch.from_numpy(np.repeat(np.arange(len(own), dtype=np.int32), own)[None])
    wide = fixed(batch)
    assert wide["input_ids"].shape == (3, 80)
    lengths = wide["packed_lengths"]
    ends = np.cumsum(lengths)
    assert all(start // 80 == (end - 1) // 80 for start, end in zip(ends - lengths, ends, strict=True))
    np.testing.assert_array_equal(wide["cu_seq_lens_q"][: len(ends) + 1], [0, *ends])
    positions = np.concatenate([np.arange(n) for n in lengths])
    np.testing.assert_array_equal(wide["position_ids"].flatten(), positions)
    runs = np.flatnonzero(np.diff(wide["seq_idx"].flatten().numpy())) + 1
    np.testing.assert_array_equal(runs, ends[:-1])
    model = patched()
    torch.testing.assert_close(model(**wide).loss, model(**batch).loss)
