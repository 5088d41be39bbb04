"""Inputs of a patched model beside its segments, accepted and refused: every rule about a batch, on the CPU.

A batch that carries segments must be exact with everything in it, and one that does not must not look packed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import (
    LENGTHS,
    assert_same,
    batch_of,
    collate,
    documents,
    ones,
    packed,
    patched,
    tiny,
)
from torch_backend.hf.inputs.boundaries import take_metadata
from torch_backend.hf.inputs.guard import Guard
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.segments import PackedMetadata

# Rows of 64 tokens: | 5 | 19 | 33 | 7 | and | 40 | 1 | 2 | 18 | 3 of padding |
PADDING = (1, slice(61, 64))


def with_hole() -> Tensor:
    mask = ones()
    mask[0, 10] = 0
    return mask


def padding_mask() -> Tensor:
    mask = ones()
    mask[PADDING] = 0
    return mask


# ---- masks beside the boundaries


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [ones(), padding_mask()], ids=["ones", "padding"])
def test_a_mask_that_agrees_with_the_boundaries_changes_nothing(mask: Tensor, dtype: torch.dtype) -> None:
    model, docs = patched(), documents()
    want = packed(model, docs)
    assert_same(packed(model, docs, batch_of(attention_mask=mask.to(dtype))), want, 0.0)


def test_a_mask_passed_by_position_is_checked_too() -> None:
    batch = batch_of()
    ids = batch.pop("input_ids")
    with pytest.raises(LayoutError, match="attention_mask contradicts the boundaries"):
        patched()(ids, with_hole(), **batch)


def test_arguments_passed_by_position_reach_the_model() -> None:
    model, batch = patched().eval(), batch_of()
    want = model(**batch).logits
    ids, positions = batch.pop("input_ids"), batch.pop("position_ids")
    assert torch.equal(model(ids, ones(), positions, **batch).logits, want)


# ---- positions and labels beside the boundaries


def test_positions_of_the_caller_are_used_as_they_are() -> None:
    """A document at positions 3, 4, 5, ... is that document, also where positions are learned."""
    model, docs = tiny("gpt2"), documents()
    moved = [model(input_ids=d[None], position_ids=torch.arange(3, 3 + len(d))[None]).logits[0] for d in docs]
    torch_backend.patch(model, verify=False)
    batch = collate(docs)
    batch["position_ids"] = batch["position_ids"] + 3
    for got, want in zip(packed(model, docs, batch).logits, moved, strict=True):
        torch.testing.assert_close(got, want)


def test_positions_that_a_model_of_the_per_document_route_would_ignore_are_refused() -> None:
    model, batch = patched("falcon_alibi"), batch_of()
    model(**batch)
    batch["position_ids"] = batch["position_ids"] + (batch["seq_idx"] == 2)
    with pytest.raises(LayoutError, match="position_ids are not those of a document of its own at row 0, token 24"):
        model(**batch)
    with pytest.raises(UnsupportedModelError, match="on 3 axes, but the packed documents of this model have"):
        model(**batch_of(position_ids=torch.zeros(3, 2, 64, dtype=torch.long)))


@pytest.mark.parametrize("beyond", [False, True])
def test_labels_outside_of_the_vocabulary_are_refused(beyond: bool) -> None:
    """Losses that make no logits would look for theirs elsewhere."""
    model, batch = patched(), batch_of()
    entries = model.config.vocab_size
    label = entries if beyond else -1
    place = torch.arange(128).view(2, 64) == 7
    wrong = f"labels holds {label} at row 0, token 7, and the model has logits for 0 to {entries - 1}"
    for call in (lambda batch: model(**batch), lambda batch: causal_lm_loss(model, batch)):
        with pytest.raises(LayoutError, match=wrong):
            call({**batch, "labels": torch.where(place, label, batch["labels"])})
    with pytest.raises(LayoutError, match=f"shift_{wrong}"):
        model(**batch, shift_labels=torch.where(place, label, batch["labels"].roll(-1, 1)))
    first = torch.arange(128).view(2, 64) % 64 == 0
    model(**{**batch, "labels": torch.where(first, label, batch["labels"])})  # which the shift drops


def test_labels_that_train_a_document_s_first_token_are_refused() -> None:
    """The last token of the document before would predict it."""
    model, batch = patched(), batch_of()
    with pytest.raises(LayoutError, match="labels train the first token of segment 1, which the last token of segment"):
        model(**{**batch, "labels": batch["input_ids"]})
    ahead = batch["input_ids"].roll(-1, 1)
    with pytest.raises(LayoutError, match="shift_labels train the first token of segment 1"):
        model(**{**batch, "shift_labels": ahead})
    at_row_end = torch.full((2, 64), -100).index_fill(1, torch.tensor([63]), 7)
    with pytest.raises(LayoutError, match="shift_labels train the first token of segment 4"):
        model(**batch, shift_labels=at_row_end)
    model(**batch, shift_labels=batch["labels"].roll(-1, 1))


def test_labels_of_a_row_s_first_token_train_nothing_and_pass() -> None:
    model, docs, batch = patched(), documents(), batch_of()
    want = packed(model, docs, batch)
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    assert_same(packed(model, docs, batch), want, 0.0)


# ---- embeddings, caches, other tensors


@pytest.mark.parametrize("key", ["pixel_values", "input_features", "encoder_hidden_states", "task_ids", "loss_mask"])
def test_a_tensor_that_no_rule_knows_is_refused_by_name(key: str) -> None:
    message = f"a packed batch came with {key}, and LlamaForCausalLM is not known to be exact with it: pack text alone"
    with pytest.raises(UnsupportedModelError, match=message):
        patched()(**batch_of(**{key: torch.zeros(2, 64)}))
    with pytest.raises(UnsupportedModelError, match=message):
        patched()(**batch_of(**{key: [{"inner": torch.zeros(2)}]}))
    patched()(**batch_of(**{key: None}))


def test_what_a_trainer_adds_to_a_batch_passes() -> None:
    model, docs = patched(), documents()
    want = packed(model, docs)
    count = torch.tensor(sum(LENGTHS) - len(LENGTHS))
    batch = {**collate(docs), "return_dict": True}
    assert_same(packed(model, docs, batch, num_items_in_batch=count, output_hidden_states=False), want, 1e-6)


def test_token_types_are_exact_where_they_are_one_more_embedding() -> None:
    model, docs = tiny("gpt2"), documents()
    types = documents(seed=2)
    want = [model(input_ids=d[None], token_type_ids=t[None]).logits[0] for d, t in zip(docs, types, strict=True)]
    torch_backend.patch(model, verify=False)
    batch = collate(docs)
    got = packed(model, docs, {**batch, "token_type_ids": collate(types)["input_ids"]}).logits
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


# ---- what contradicts itself

MASK = "attention_mask contradicts the boundaries at row 0, token "
ROWS_OF_LABELS = (torch.zeros(2, 63), torch.zeros(128), torch.zeros(2), [[0] * 64] * 2)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": with_hole()}, f"{MASK}10"),
    ({"attention_mask": ones().where(torch.arange(64) < 60, 0)}, f"{MASK}60"),
    ({"attention_mask": ones() * 2}, f"{MASK}0: .* may hold ones, and zeros on whole segments"),
    ({"attention_mask": torch.ones(2, 63)}, r"attention_mask must be None or \[2, 64\], got \[2, 63\]"),
    ({"attention_mask": torch.ones(2, 1, 64, 64)}, r"attention_mask must be None or \[2, 64\], got \[2, 1, 64, 64\]"),
    ({"attention_mask": {"full_attention": None}}, r"attention_mask must be None or \[2, 64\], got a dict"),
    (
        {"attention_mask": create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu")},
        "attention_mask must be None .* got a BlockMask: .* Leave the mask out, or the boundaries to use it",
    ),
    *(
        ({"position_ids": torch.zeros(shape).long()}, r"position_ids must be \[2, 64\], or several axes of it")
        for shape in ((64,), (1, 64), (2, 63), (5, 2, 64))
    ),
    *(
        ({name: labels}, rf"{name} must be \[2, 64\], one per token as in input_ids")
        for name in ("labels", "shift_labels")
        for labels in ROWS_OF_LABELS
    ),
    ({"input_ids": None}, "the batch has neither input_ids nor inputs_embeds: pass one of them"),
    ({"input_ids": torch.zeros(128, dtype=torch.long)}, r"input_ids must be \[B, S\], got \[128\]"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(128, 64)}, r"inputs_embeds must be \[B, S, D\], got \[128,"),
    (
        {"packed_lengths": (5, 19, 33, 7, 40, 1, 2, 17, 4)},
        r"packed_lengths and cu_seq_lens_q disagree at boundary 8 \(124 and 125",
    ),
    ({"packed_lengths": (5, 19, 40, 64)}, r"packed_lengths and cu_seq_lens_q disagree at boundary 3 \(64 and 57\)"),
    ({"packed_lengths": (64.0, 64.0)}, r"packed_lengths must be a tuple of ints, got \(64.0, 64.0\)"),
    (
        {"packed_lengths": torch.tensor([64, 64])},
        "packed_lengths must be a tuple of ints on the host, got a Tensor",
    ),
    ({"packed_lengths": (5, -1, 124)}, "segment lengths must be positive .*: segment 1 has -1 tokens"),
    ({"packed_lengths": (64, 32)}, "the segments hold 96 tokens and input_ids 128: padding belongs to segments of"),
    ({"packed_lengths": (1,) * 128}, "packed_lengths has 128 segments and cu_seq_lens_q 9"),
    (
        {"packed_lengths": None, "cu_seq_lens_q": [0, 64, 128]},
        r"cu_seq_lens_q must be an integer tensor \[N\+1\] .*, got list",
    ),
    (
        {"cu_seq_lens_q": torch.tensor([[0, 64, 128]])},
        r"cu_seq_lens_q must be an integer tensor .* torch.int64 \[1, 3\]",
    ),
    (
        {"cu_seq_lens_k": torch.tensor([0.0, 128.0])},
        r"cu_seq_lens_k must be an integer tensor .* torch.float32 \[2\]",
    ),
    (
        {"cu_seq_lens_k": torch.tensor([0, 64, 128])},
        r"cu_seq_lens_q and cu_seq_lens_k differ at boundary 1 \(5 and 64",
    ),
    ({"max_length_q": 39}, "max_length_q is 39 and segment 4 has 40 tokens"),
    ({"max_length_k": 5}, "max_length_k is 5 and segment 4 has 40 tokens"),
    ({"seq_idx": torch.zeros(2, 64)}, r"seq_idx contradicts the boundaries at boundary 0 \(5 and nothing\)"),
    ({"seq_idx": torch.zeros(2, 63)}, r"seq_idx must number the 128 tokens of the batch, got \[2, 63\]"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_batch_that_contradicts_itself_is_refused_with_the_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        patched()(**batch_of(**change))


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([3, 64, 128], "cu_seq_lens_q must start at 0, got 3"),
        ([0, 64, 32, 128], "cu_seq_lens_q must not decrease: entry 2 is 32 after 64"),
        ([0, 64, 130], "the segments hold 130 tokens and input_ids 128"),
        (
            [0, 60, 70, 128],
            "a segment crosses from one row of 64 tokens into the next: segment 1 holds tokens 60 to 69",
        ),
    ],
)
def test_boundaries_that_contradict_the_batch_are_refused_with_the_place(boundaries: list[int], message: str) -> None:
    ids = collate(documents())["input_ids"]
    with pytest.raises(LayoutError, match=message):
        patched()(input_ids=ids, cu_seq_lens_q=torch.tensor(boundaries))


def test_a_larger_longest_length_and_repeated_boundaries_pass() -> None:
    model, docs = patched(), documents()
    want = packed(model, docs)
    batch = collate(docs, max_seqlen=64, bucket=16)
    assert len(batch["cu_seq_lens_q"]) == 17 and batch["max_length_q"] == 64
    assert_same(packed(model, docs, batch), want, 1e-6)


# ---- segments on a device


def taken(guard: Guard, **values: Any) -> PackedMetadata:
    """Returns the segments that are found for a batch of 2 rows of 64 tokens, lengths not needed on the host."""
    ids = torch.zeros(2, 64, dtype=torch.long)
    return take_metadata(values, tokens=ids, host_lengths=False, guard=guard)


def test_lengths_on_the_host_decide_where_boundaries_on_a_device_contradict_them() -> None:
    guard, right = DeviceGuard(), torch.tensor([0, 60, 64, 128])
    taken(guard, packed_lengths=(60, 4, 64), cu_seq_lens_q=right)
    packed = taken(guard, packed_lengths=(64, 64), cu_seq_lens_q=right)
    assert packed.cu_seqlens.tolist() == [0, 64, 128, 128]  # as many entries as the batch has
    with pytest.raises(LayoutError, match="earlier batch: packed_lengths and cu_seq_lens_q disagree at boundary 1"):
        guard.poll(wait=True)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 64, 128], None),
        ([0, 64, 64, 128, 128], None),
        ([3, 64, 128], "at its first or last entry: it must go from 0 to at most 128"),
        ([0, 64, 100], None),  # the rest is padding, as on the host
        ([0, 64, 129], "at segment 1: .* cross no row of 64 tokens"),
        ([0, 64, 128, 192], "at its first or last entry"),
        ([0, 64, 32, 64, 128], "at segment 1"),
        ([0, 60, 70, 128], "at segment 1: .* cross no row of 64 tokens"),
        ([0, 128], r"at segment 0: .* hold no segment longer than 64 \(max_length_q\)"),
    ],
)
def test_boundaries_that_only_the_device_knows_are_checked_there(boundaries: list[int], message: str | None) -> None:
    for batches in (1, 2):  # the first is waited for, the second is not
        guard = DeviceGuard()
        if batches == 2:
            taken(guard, cu_seq_lens_q=torch.tensor([0, 64, 128]), max_length_q=64)
        with (
            nullcontext() if message is None else pytest.raises(LayoutError, match=f"cu_seq_lens_q is wrong {message}")
        ):
            taken(guard, cu_seq_lens_q=torch.tensor(boundaries), max_length_q=64)
            guard.poll(wait=True)


@pytest.mark.parametrize(
    "change",
    [{"attention_mask": with_hole()}, {"labels": torch.zeros(2, 64, dtype=torch.long)}],
    ids=["mask", "labels"],
)
def test_what_contradicts_the_segments_is_found_on_a_device_too(change: dict[str, Any]) -> None:
    model, batch = patched(), batch_of(attention_mask=ones())
    state_of(model).guard = DeviceGuard()
    model(**batch)
    model(**{**batch, **change})
    with pytest.raises(LayoutError, match="in an earlier batch: (attention_mask|labels) "):
        state_of(model).guard.poll(wait=True)
