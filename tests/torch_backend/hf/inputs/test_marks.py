"""with_boundaries: what marks documents and padding, marks that contradict each other, and what is handed through."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from packing_core.errors import LayoutError
from tests.processes import limited
from torch_backend import PackedCollator, with_boundaries

# One row: | 1 2 3 | 4 5 | padding |
IDS = torch.tensor([[1, 2, 3, 4, 5, 0]])
LABELS = IDS.masked_fill(IDS == 0, -100)
MARKS: dict[str, dict[str, Any]] = {
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 3, 5])},
    "cu_seq_lens_q, list": {"cu_seq_lens_q": [0, 3, 5]},
    "packed_lengths": {"packed_lengths": (3, 2, 1)},
    "seq_lengths": {"seq_lengths": [[3, 2]]},
    "seq_lengths, flat": {"seq_lengths": torch.tensor([3, 2])},
    "packed_seq_lengths": {"packed_seq_lengths": torch.tensor([[3, 2, 0]])},
    "segment_ids": {"segment_ids": torch.tensor([[1, 1, 1, 2, 2, 0]])},
    "seq_idx": {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, -1]])},
    "numbered mask": {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0]])},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])},
}


def collate(**batch: Any) -> dict[str, Any]:
    """Applies with_boundaries to a batch of some collator."""
    return with_boundaries(dict)({"input_ids": IDS, **copy.deepcopy(batch)})


def ones(*zeros: int) -> Tensor:
    mask = torch.ones_like(IDS)
    mask[0, list(zeros)] = 0
    return mask


@pytest.mark.parametrize("mark", MARKS)
def test_every_mark_gives_the_same_segments(mark: str) -> None:
    batch = collate(labels=LABELS.clone(), **MARKS[mark])
    assert next(iter(batch)) == "input_ids"
    assert batch["packed_lengths"] == (3, 2, 1)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 6]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert not batch.keys() & {"segment_ids", "seq_lengths", "packed_seq_lengths"}


@pytest.mark.parametrize("first", MARKS)
@pytest.mark.parametrize("second", MARKS)
def test_marks_that_agree_may_stand_together(first: str, second: str) -> None:
    assert collate(**{**MARKS[first], **MARKS[second]})["packed_lengths"] == (3, 2, 1)


@pytest.mark.parametrize("mark", [name for name in MARKS if "cu_seq_lens_q" not in name])
def test_marks_that_disagree_are_refused(mark: str) -> None:
    with pytest.raises(LayoutError, match=r"disagree at token [23] of row 0|restart at token 3 of row 0"):
        collate(cu_seq_lens_q=torch.tensor([0, 2, 5]), cu_seq_lens_k=None, **MARKS[mark])


def test_boundaries_of_queries_and_keys_must_be_the_same() -> None:
    with pytest.raises(LayoutError, match="cu_seq_lens_q and cu_seq_lens_k disagree at token 2 of row 0"):
        collate(cu_seq_lens_q=torch.tensor([0, 3, 5]), cu_seq_lens_k=torch.tensor([0, 2, 5]))


def test_rows_are_divided_each_by_its_own_marks() -> None:
    # rows: | 0 1 | 2 3 |  and  | 4 5 6 | padding |
    ids = torch.arange(8).view(2, 4)
    for marks in (
        {"seq_lengths": [[2, 2], [3]]},
        {"seq_lengths": torch.tensor([[2, 2], [3, 0]])},
        {"packed_seq_lengths": [2, 2, 3, 1]},
        {"cu_seq_lens_q": torch.tensor([0, 2, 4, 7])},
        {"position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])},
    ):
        batch = collate(input_ids=ids, **marks)
        assert batch["packed_lengths"] == (2, 2, 3, 1), marks
        assert batch["seq_idx"].tolist() == [[0, 0, 1, 1], [2, 2, 2, 3]]
    one_per_row = collate(input_ids=ids, seq_lengths=torch.tensor([4, 3]))
    assert one_per_row["packed_lengths"] == (4, 3, 1)


@pytest.mark.parametrize("mark", ["segment_ids", "attention_mask", "seq_idx"])
def test_numbers_begin_anew_in_every_row(mark: str) -> None:
    # rows: | 0 1 | padding |  and  | 3 | 4 5 |
    numbers = torch.tensor([[1, 1, 0], [1, 2, 2]]) - int(mark == "seq_idx")
    batch = collate(input_ids=torch.arange(6).view(2, 3), **{mark: numbers})
    assert batch["packed_lengths"] == (2, 1, 1, 2)


def test_documents_that_the_collator_joins_are_refused() -> None:
    def examples() -> list[dict[str, list[int]]]:
        return [{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}, {"input_ids": [4, 5], "seq_lengths": [2]}]

    collate = with_boundaries(DataCollatorWithFlattening())
    with pytest.raises(LayoutError, match="hold 3 documents by their lengths, and the collator marks 2 in as many"):
        collate(examples())
    one_each = [{"input_ids": ids, "seq_lengths": [len(ids)]} for ids in ([5, 6, 7], [8, 9])]
    assert collate(one_each)["packed_lengths"] == (3, 2)


def test_a_batch_without_marks_is_refused() -> None:
    with pytest.raises(LayoutError, match="marks no boundaries: .* the collator gave input_ids, attention_mask"):
        collate(attention_mask=ones())
    with pytest.raises(LayoutError, match="the collator gave no input_ids, only labels"):
        with_boundaries(dict)({"labels": IDS})


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, "cu_seq_lens_q end at 9 and input_ids has 6 tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 3, 6])}, "cu_seq_lens_q must start at 0 and never decrease"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 3, 6])}, "cu_seq_lens_q must start at 0 and never decrease"),
        ({"cu_seq_lens_q": torch.tensor([[0, 3, 6]])}, r"cu_seq_lens_q has shape \[1, 3\]: pass one dimension"),
        ({"seq_lengths": [[3, 4]]}, "seq_lengths add up to 7 and input_ids has 6 tokens in row 0"),
        ({"seq_lengths": [[3, -1]]}, "seq_lengths holds -1"),
        (
            {"seq_lengths": [[3], [3]]},
            "seq_lengths has lengths of 2 rows and input_ids has 1: give each row a list",
        ),
        ({"segment_ids": torch.ones(1, 5)}, r"segment_ids has shape \[1, 5\] and input_ids \[1, 6\]"),
        ({"position_ids": torch.zeros(2, 1, 6)}, r"position_ids has shape \[2, 1, 6\]"),
    ],
)
def test_marks_that_do_not_fit_the_rows_are_refused(marks: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        collate(**marks)


def test_a_segment_that_crosses_into_the_next_row_is_refused() -> None:
    ids = torch.arange(6).view(2, 3)
    for marks in ({"cu_seq_lens_q": torch.tensor([0, 4, 6])}, {"seq_lengths": [4, 2]}):
        with pytest.raises(
            LayoutError, match=r"a segment of \w+ crosses from row 0 into the next: end it with the row"
        ):
            collate(input_ids=ids, **marks)


def test_boundaries_that_stop_before_trained_tokens_are_refused() -> None:
    with pytest.raises(LayoutError, match="cu_seq_lens_q end at 3 and input_ids has 6 tokens"):
        collate(labels=IDS.clone(), cu_seq_lens_q=torch.tensor([0, 3]))
    with pytest.raises(LayoutError, match="cu_seq_lens_q end at 3 and input_ids has 6 tokens"):
        collate(shift_labels=IDS.clone(), cu_seq_lens_q=torch.tensor([0, 3]))
    untrained = IDS.clone()
    untrained[0, 3:] = -100
    assert collate(labels=untrained, cu_seq_lens_q=torch.tensor([0, 3]))["packed_lengths"] == (3, 3)


# Attention masks beside boundaries.


@pytest.mark.parametrize("mark", ["cu_seq_lens_q", "seq_lengths", "position_ids"])
def test_a_mask_that_says_nothing_more_is_dropped(mark: str) -> None:
    full = {"cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "seq_lengths": {"seq_lengths": [[3, 3]]}}
    full["position_ids"] = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    assert "attention_mask" not in collate(attention_mask=ones(), **full[mark])


@pytest.mark.parametrize("mark", MARKS)
def test_a_mask_that_marks_padding_is_kept(mark: str) -> None:
    mask = MARKS[mark].get("attention_mask", ones(5))
    batch = collate(**{**MARKS[mark], "attention_mask": mask})
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert batch["attention_mask"].dtype == mask.dtype


@pytest.mark.parametrize("mark", ["segment_ids", "seq_idx", "seq_lengths", "cu_seq_lens_q"])
def test_padding_that_only_the_boundaries_know_gets_a_mask(mark: str) -> None:
    """A router's auxiliary loss reads it: segments alone do not say which of them is padding."""
    mask = collate(**MARKS[mark])["attention_mask"]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 0]] and mask.dtype == torch.int64


@pytest.mark.parametrize("zeros", [(1,), (4,), (4, 5), (0, 1)])
@pytest.mark.parametrize("mark", ["cu_seq_lens_q", "packed_lengths", "segment_ids"])
def test_a_mask_with_a_hole_in_a_document_is_refused(mark: str, zeros: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"token \d of row 0 is padding inside a document: attention_mask"):
        collate(**{**MARKS[mark], "attention_mask": ones(*zeros)})


@pytest.mark.parametrize(
    "marks",
    [
        {"segment_ids": torch.tensor([[1, 1, 0, 1, 2, 2]])},
        {"seq_idx": torch.tensor([[0, 0, -1, 0, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 2, 2]])},
    ],
    ids=lambda marks: next(iter(marks)),
)
def test_a_document_that_is_numbered_on_both_sides_of_padding_is_refused(marks: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="token 2 of row 0 is padding inside a document"):
        collate(**marks)


def test_a_mask_with_a_hole_where_positions_count_on_is_refused() -> None:
    with pytest.raises(LayoutError, match="token 1 of row 0 is padding inside a document"):
        collate(attention_mask=ones(1), **MARKS["position_ids"])
    # 1 2 3 | 4 | padding | 0: positions restart after the padding, so what it divides are two documents
    assert collate(attention_mask=ones(4), **MARKS["position_ids"])["packed_lengths"] == (3, 1, 1, 1)


def test_padding_may_stand_before_the_documents_of_a_row() -> None:
    batch = collate(attention_mask=ones(0, 1), position_ids=torch.tensor([[1, 1, 0, 1, 0, 1]]))
    assert batch["packed_lengths"] == (2, 2, 2)
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 1, 6, 6), r"attention_mask has shape \[1, 1, 6, 6\] and input_ids \[1, 6\]"),
        ({"full_attention": None}, "attention_mask is a dict"),
        (torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, -1e9]]), "attention_mask must hold 1 at tokens and 0 at padding"),
    ],
)
def test_a_mask_that_cannot_be_checked_against_the_boundaries_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        collate(cu_seq_lens_q=torch.tensor([0, 3, 6]), attention_mask=mask)


def test_long_padding_is_cut_so_that_it_is_no_longer_than_the_documents() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, *[0] * 7]])
    batch = collate(input_ids=ids, seq_lengths=[[3, 2]])
    assert batch["packed_lengths"] == (3, 2, 3, 3, 1) and batch["max_length_q"] == 3


# Positions.


def test_positions_that_say_more_than_the_boundaries_are_kept() -> None:
    """transformers starts RoBERTa's at 2; a piece of a longer document may go on counting."""
    for positions in ([[2, 3, 4, 2, 3, 2]], [[7, 8, 9, 0, 1, 0]], [[0, 1, 9, 0, 5, 0]]):
        batch = collate(position_ids=torch.tensor(positions), **MARKS["segment_ids"])
        assert batch["position_ids"].tolist() == positions


def test_positions_that_count_through_the_row_restart() -> None:
    batch = collate(position_ids=torch.arange(6)[None], **MARKS["segment_ids"])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]


def test_positions_that_restart_inside_a_segment_are_refused() -> None:
    with pytest.raises(
        LayoutError,
        match="position_ids restart at token 1 of row 0, inside a document of segment_ids: leave out the one that",
    ):
        collate(position_ids=torch.tensor([[0, 0, 1, 0, 1, 0]]), **MARKS["segment_ids"])


# M-RoPE: text, then an image of 2x2 at t=2; then a second document of text.  axes: temporal, height, width
MROPE = torch.tensor([[[0, 1, 2, 2, 2, 2, 4, 0, 1]], [[0, 1, 2, 2, 3, 3, 4, 0, 1]], [[0, 1, 2, 3, 2, 3, 4, 0, 1]]])


@pytest.mark.parametrize("text_axis", [False, True], ids=["[3, B, S]", "[4, B, S]"])
@pytest.mark.parametrize("marks", [{}, {"cu_seq_lens_q": torch.tensor([0, 7, 9])}], ids=["alone", "beside boundaries"])
def test_positions_of_several_axes_are_handed_through(text_axis: bool, marks: dict[str, Any]) -> None:
    text = torch.tensor([[[0, 1, 2, 3, 4, 5, 6, 0, 1]]])
    positions = torch.cat([text, MROPE]) if text_axis else MROPE
    batch = collate(input_ids=torch.arange(9)[None], position_ids=positions, **marks)
    assert batch["packed_lengths"] == (7, 2)
    assert torch.equal(batch["position_ids"], positions)


def test_a_document_of_one_token_is_found_in_positions_of_several_axes() -> None:
    positions = torch.tensor([[0, 0, 1]]).expand(3, 1, 3)
    assert collate(input_ids=torch.arange(3)[None], position_ids=positions)["packed_lengths"] == (1, 2)


def test_positions_of_several_axes_that_restart_elsewhere_are_refused() -> None:
    """Interleaved audio and video go back in time within a document: that is no restart at 0."""
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]]).expand(3, 1, 6)
    with pytest.raises(LayoutError, match="position_ids go back at token 4 of row 0 without restarting"):
        collate(position_ids=positions)
    with pytest.raises(LayoutError, match="position_ids restart at token 7 of row 0, inside a document of cu_seq_lens"):
        collate(input_ids=torch.arange(9)[None], position_ids=MROPE, cu_seq_lens_q=torch.tensor([0, 9]))


# Labels.


@pytest.mark.parametrize("column", ["loss_mask", "completion_mask", "assistant_masks"])
def test_masks_of_trained_tokens_in_the_batch_hold_for_its_labels(column: str) -> None:
    batch = collate(labels=IDS.clone(), **{column: torch.tensor([[1, 0, 1, 1, 1, 1]])}, **MARKS["segment_ids"])
    assert batch["labels"].tolist() == [[-100, -100, 3, -100, 5, -100]]


def test_shifted_labels_stop_at_the_end_of_each_segment() -> None:
    shifted = torch.tensor([[2, 3, 4, 5, 0, 9]])
    batch = collate(shift_labels=shifted, **MARKS["segment_ids"])
    assert batch["shift_labels"].tolist() == [[2, 3, -100, 5, -100, -100]]


def test_labels_that_are_not_per_token_are_handed_through() -> None:
    assert collate(labels=torch.tensor([1]), **MARKS["segment_ids"])["labels"].tolist() == [1]


def test_the_collators_tensors_are_left_as_they_were() -> None:
    given = {"input_ids": IDS.clone(), "labels": LABELS.clone(), **copy.deepcopy(MARKS["numbered mask"])}
    before = copy.deepcopy(given)
    with_boundaries(lambda batch: batch)(given)
    assert given.keys() == before.keys() and all(torch.equal(given[name], before[name]) for name in given)


# The collator itself.


def equal(x: object, y: object) -> bool:
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_wrapping_twice_changes_nothing() -> None:
    once = collate(labels=IDS.clone(), **MARKS["segment_ids"])
    twice = with_boundaries(dict)(once)
    assert once.keys() == twice.keys()
    assert all(equal(once[name], twice[name]) for name in once)


def test_our_own_batches_pass() -> None:
    batch = PackedCollator(capacity=4)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    carried = with_boundaries(dict)(batch)
    assert all(equal(batch[name], carried[name]) for name in batch)


def test_collators_are_picklable() -> None:
    wrapped, packed = pickle.loads(pickle.dumps((with_boundaries(dict), PackedCollator(capacity=4))))
    assert wrapped({"input_ids": IDS, "seq_lengths": [[3, 2]]})["packed_lengths"] == (3, 2, 1)
    assert packed([{"input_ids": [1, 2, 3]}])["packed_lengths"] == (3, 1)


@pytest.mark.slow
@limited()
def test_workers_that_are_spawned_carry_boundaries() -> None:
    data = [{"input_ids": IDS, "seq_lengths": [[3, 2]]}]
    loader = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=with_boundaries(dict),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    (batch,) = list(loader)
    assert batch["packed_lengths"] == (3, 2, 1)
