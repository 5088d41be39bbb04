"""Packed rows that were padded, cut, joined or folded by hand: boundaries that no longer fit them raise.

Below, | 5 | 19 | 8 | are the documents of a row of 32 tokens, and their lengths stay as they were.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import LayoutError
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import collate, documents, patched
from torch_backend import PackedCollator, with_boundaries
from torch_backend.hf.inputs.boundaries import take_metadata
from torch_backend.hf.patch import state_of

LENGTHS = (5, 19, 8)
ROW = torch.cat(documents(LENGTHS))[None]
CU_SEQLENS = torch.tensor([0, 5, 24, 32], dtype=torch.int32)
BOUNDARIES = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS, "max_length_q": 19, "max_length_k": 19}
RIGHT, LEFT = F.pad(ROW, (0, 8)), F.pad(ROW, (8, 0))
MORE = torch.cat(documents(LENGTHS, seed=2))[None]
DIFFER = "the tokens after it differ"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (LEFT, rf"{DIFFER} \(row 0, token 32\)"),
        (torch.cat([ROW, MORE], 1), rf"{DIFFER} \(row 0, token 32\)"),
        (torch.cat([ROW, MORE]), rf"{DIFFER} \(row 1, token 0\)"),
        (ROW[:, :16], "the segments hold 32 tokens and input_ids 16"),
        (ROW[:, 16:], "the segments hold 32 tokens and input_ids 16"),
        (ROW.view(2, 16), "segment 1 holds tokens 5 to 23"),
    ],
    ids=["left padding", "two rows joined", "two rows stacked", "first half", "second half", "folded"],
)
def test_boundaries_of_another_shape_raise(ids: Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        patched()(input_ids=ids, **BOUNDARIES)


def test_padding_after_the_last_boundary_repeats_one_token() -> None:
    model = patched().eval()
    want = model(input_ids=ROW, **BOUNDARIES).logits
    assert torch.allclose(model(input_ids=RIGHT, **BOUNDARIES).logits[:, :32], want, atol=1e-6)


def test_boundaries_on_a_device_are_looked_at_without_waiting() -> None:
    model = patched()
    guard = state_of(model).guard = DeviceGuard()
    guard.waits = False
    take_metadata(dict(BOUNDARIES), tokens=LEFT, host_lengths=False, guard=guard)
    with pytest.raises(LayoutError, match=f"^in an earlier batch: cu_seq_lens_q ends before .*{DIFFER}"):
        guard.poll(wait=True)
    for _ in range(20):
        take_metadata(dict(BOUNDARIES), tokens=LEFT, host_lengths=False, guard=guard)
    assert sum("differ" in str(check.error(0)) for check in guard.pending) == 7


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            LEFT,
            "seq_lengths add up to 32 and input_ids has 40 tokens in row 0: the tokens after the last document diff",
        ),
        (torch.cat([ROW, MORE], 1), "in row 0: the tokens after the last document differ"),
        (ROW[:, :16], "seq_lengths add up to 32 and input_ids has 16 tokens in row 0"),
    ],
    ids=["left padding", "two rows joined", "half"],
)
def test_lengths_of_another_shape_raise(ids: Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        with_boundaries(dict)({"input_ids": ids, "seq_lengths": [list(LENGTHS)]})
    with pytest.raises(LayoutError, match=r"seq_lengths add up to 32 and input_ids has \d+ tokens in example 0"):
        PackedCollator()([{"input_ids": ids[0], "seq_lengths": LENGTHS}])


def test_lengths_beside_padding_that_something_marks_are_kept() -> None:
    collate_ = with_boundaries(dict)
    marked = {"input_ids": LEFT, "seq_lengths": [[8, *LENGTHS]], "attention_mask": (LEFT != 0).long()}
    assert collate_(marked)["packed_lengths"] == (8, *LENGTHS)
    assert collate_({"input_ids": RIGHT, "seq_lengths": [list(LENGTHS)]})["packed_lengths"] == (*LENGTHS, 8)
    other = torch.cat([ROW, torch.tensor([[2, 0, 0]])], 1)  # the end of a text, then padding
    mask = torch.cat([torch.ones(1, 32), torch.zeros(1, 3)], 1).long()
    batch: dict[str, Any] = {"input_ids": other, "seq_lengths": [list(LENGTHS)]}
    assert collate_({**batch, "attention_mask": mask})["packed_lengths"] == (*LENGTHS, 3)
    assert collate_({**batch, "labels": torch.where(mask == 0, -100, other)})["packed_lengths"] == (*LENGTHS, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.flip(1), "seq_idx contradicts the boundaries"),
        (lambda x: F.pad(x, (0, 8)), "the segments hold 128 tokens and input_ids 144"),
        (lambda x: F.pad(x, (8, 0)), "the segments hold 128 tokens and input_ids 144"),
        (lambda x: x[:, :32], "the segments hold 128 tokens and input_ids 64"),
        (lambda x: x[:1], "the segments hold 128 tokens and input_ids 64"),
        (lambda x: x.view(-1, 32), "a segment crosses from one row of 32 tokens into the next"),
        (lambda x: x.flip(0), "seq_idx contradicts the boundaries"),
    ],
    ids=["reversed", "padded right", "padded left", "cut", "one of two rows", "folded", "rows exchanged"],
)
def test_a_batch_of_ours_that_is_reshaped_raises(change: Any, message: str) -> None:
    batch = collate(documents())
    reshaped = {name: change(x) if isinstance(x, Tensor) and x.ndim == 2 else x for name, x in batch.items()}
    with pytest.raises(LayoutError, match=message):
        patched()(**reshaped)
