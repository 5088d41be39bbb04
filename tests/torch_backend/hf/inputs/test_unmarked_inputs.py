"""Batches that carry no segments: a patched model refuses what looks packed, and runs the rest as before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import documents, patched, tiny
from torch_backend.hf.inputs.guard import Guard
from torch_backend.hf.inputs.unmarked import _restarts, check_unmarked
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss


def left_padded() -> dict[str, Tensor]:
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": torch.stack(documents((6, 6))), "attention_mask": mask, "position_ids": positions}


RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
OF_ONE_TOKEN = torch.tensor([[0, 0, 1, 2, 3, 4]] * 2)  # the first document has one token, so no position falls
GROWING = torch.arange(6).expand(2, -1)


def axes(*rows: list[int]) -> Tensor:
    """[3, 2, 6]: time, height and width of two equal rows."""
    return torch.tensor([[row, row] for row in rows])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_ids": RESTARTING}, r"position_ids restart inside a row \(row 0, token 3\) but .* PackedCollator"),
        ({"position_ids": RESTARTING, "attention_mask": torch.ones(2, 6)}, "position_ids restart inside a row"),
        ({"position_ids": RESTARTING[:1]}, "position_ids restart inside a row"),
        ({"position_ids": RESTARTING[0]}, "position_ids restart inside a row"),
        ({"position_ids": RESTARTING.expand(3, -1, -1)}, "position_ids restart inside a row"),
        ({"position_ids": torch.stack([RESTARTING, *[GROWING] * 3])}, "position_ids restart inside a row"),
        ({"position_ids": OF_ONE_TOKEN}, r"position_ids restart inside a row \(row 0, token 1\)"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0]] * 2)}, r"\(row 0, token 5\)"),  # the last has one token
        ({"position_ids": torch.tensor([[4, 5, 6, 0, 1, 2]] * 2)}, r"\(row 0, token 3\)"),  # a later piece first
        ({"position_ids": RESTARTING + 2}, r"\(row 0, token 3\)"),  # as RoBERTa counts
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 1]] * 2)}, r"\(row 0, token 3\)"),  # padding without a mask
        ({"position_ids": torch.tensor([[0, 1, 1, 0, 1, 2]] * 2)}, r"\(row 0, token 3\)"),
        ({"position_ids": torch.stack([OF_ONE_TOKEN, *[GROWING] * 3])}, "position_ids restart inside a row"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)},
            "attention_mask is neither 0 nor 1 at row 0, token 3",
        ),
        (
            {"attention_mask": torch.tensor([[1] * 6, [0, 0, 3, 3, 3, 3]])},
            "neither 0 nor 1 at row 1, token 2, as if it num",
        ),
        (
            {"attention_mask": torch.tensor([[1.0, 1, 1, 2, 2, 2]] * 2)},
            "attention_mask is neither 0 nor 1 at row 0, token 3",
        ),
        ({"seq_idx": torch.zeros(2, 6)}, "the batch has seq_idx but no cu_seq_lens_q"),
        ({"cu_seq_lens_k": torch.tensor([0, 6, 12])}, "the batch has cu_seq_lens_k but no cu_seq_lens_q"),
        ({"max_length_q": 6}, "the batch has max_length_q but no cu_seq_lens_q"),
    ],
)
def test_a_batch_that_looks_packed_and_carries_no_segments_is_refused(
    change: dict[str, Any], message: str, train: bool
) -> None:
    with pytest.raises(LayoutError, match=message):
        patched().train(train)(input_ids=torch.stack(documents((6, 6))), **change)


UNPACKED: dict[str, dict[str, Tensor]] = {
    "positions": {"position_ids": GROWING},
    "offset": {"position_ids": GROWING + 100},
    "in pairs": {"position_ids": torch.tensor([[0, 0, 1, 1, 2, 2]] * 2)},
    "to and fro": {"position_ids": torch.tensor([[0, 1, 2, 2, 1, 3]] * 2), "attention_mask": torch.ones(2, 6)},
    "falling": {"position_ids": GROWING.flip(1)},
    "equal": {"position_ids": torch.zeros(1, 6, dtype=torch.long)},
    "right padding": {"attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])},
    "left padding by mask": {"attention_mask": torch.tensor([[True] * 6, [False] * 2 + [True] * 4])},
    "left padding": left_padded(),
    "4d and positions": {"attention_mask": torch.zeros(2, 1, 6, 6), "position_ids": RESTARTING},
    "4d": {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", UNPACKED)
def test_a_batch_that_is_not_packed_is_left_alone(name: str, train: bool) -> None:
    model = tiny("llama").train(train)
    inputs = {"input_ids": torch.stack(documents((6, 6))), **UNPACKED[name]}
    want = model(**inputs).logits
    torch_backend.patch(model, verify=False)
    assert torch.equal(model(**inputs).logits, want)


# time, height and width -> whether they restart
THREE_AXES: list[tuple[Tensor, bool]] = [
    (axes([0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]), False),  # an image of 2 x 2
    (axes([0, 1, 9, 1, 9, 3], [0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 3]), False),  # frames far apart, then text
    (axes([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]), True),  # text
    (axes([0, 1, 1, 1, 0, 1], [0, 1, 1, 2, 0, 1], [0, 1, 2, 2, 0, 1]), True),  # text after an image
    (axes([0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]), True),  # time alone
    (axes([0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4]), True),  # a document of one token
    (axes([0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 1]), True),  # an image at the beginning, then text
    (axes([0, 0, 0, 0, 2, 3], [0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 2, 3]), False),  # an image at the beginning
    (torch.zeros(3, 2, 6), False),  # no positions
]


@pytest.mark.parametrize(("positions", "restarts"), THREE_AXES)
def test_positions_on_three_axes_restart_where_a_document_may_begin(positions: Tensor, restarts: bool) -> None:
    with pytest.raises(LayoutError, match="position_ids restart inside a row") if restarts else nullcontext():
        check_unmarked({"input_ids": torch.zeros(2, 6), "position_ids": positions}, Guard())


@pytest.mark.parametrize(
    "change", [{"position_ids": RESTARTING}, {"attention_mask": RESTARTING + 1}], ids=["positions", "mask"]
)
def test_the_same_rule_holds_on_a_device(change: dict[str, Tensor]) -> None:
    """In training the first batch is waited for; later ones, and evaluation, are told when the answer is there."""
    model, ids = patched(), torch.stack(documents((6, 6)))
    state_of(model).guard = DeviceGuard()
    with pytest.raises(LayoutError, match="^(position_ids restart|attention_mask is neither)"):
        model(input_ids=ids, **change)
    model.eval()
    state_of(model).guard = guard = DeviceGuard()
    model(input_ids=ids, **change)
    guard.copies[0].arrived = True
    with pytest.raises(LayoutError, match="^in an earlier batch: (position_ids restart|attention_mask is neither)"):
        model(input_ids=ids)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_left_padding_is_unchanged(cache: str) -> None:
    model = tiny("llama").eval()
    inputs = {key: value for key, value in left_padded().items() if key != "position_ids"}
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    want = model.generate(**inputs, **options)
    torch_backend.patch(model, verify=False)
    assert torch.equal(model.generate(**inputs, **options), want)


def test_positions_beside_a_cache_are_those_of_generation() -> None:
    model = patched().eval()
    cache = model(input_ids=torch.stack(documents((6, 6)))).past_key_values
    model(
        input_ids=torch.ones(2, 3, dtype=torch.long), position_ids=torch.tensor([[6, 7, 6]] * 2), past_key_values=cache
    )


def test_documents_of_one_token_are_told_apart_on_three_axes_and_behind_text_positions() -> None:
    positions = torch.tensor([[0, 0, 1, 2]])
    for count in (3, 4):
        assert _restarts(positions.expand(count, 1, 4), None).tolist() == [[True, False, False]]


def test_padding_on_three_axes_is_no_restart() -> None:
    positions = axes([0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    assert not _restarts(positions, mask).any()
    assert not _restarts(positions.roll(-2, 2), mask.roll(-2, 1)).any()


@pytest.mark.parametrize("change", [{"position_ids": RESTARTING}, {"attention_mask": RESTARTING + 1}])
def test_a_compiled_model_refuses_what_looks_packed(change: dict[str, Any]) -> None:
    model = torch.compile(patched(), backend="eager")
    with pytest.raises(RuntimeError, match="a batch in a compiled model breaks a rule of packing"):
        model(input_ids=torch.stack(documents((6, 6))), **change)


def test_positions_that_begin_again_inside_a_segment_are_refused() -> None:
    batch = {"input_ids": torch.stack(documents((6, 6))), "cu_seq_lens_q": torch.tensor([0, 6, 12])}
    model = patched()
    model(**batch, position_ids=GROWING + 3)
    with pytest.raises(LayoutError, match="begin again at row 0, token 3, inside a segment of cu_seq_lens_q"):
        model(**batch, position_ids=RESTARTING)
    with pytest.raises(LayoutError, match="begin again at row 1, token 4"):
        model(**batch, position_ids=torch.tensor([[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 5, 6]]))


OFFSETS = torch.tensor([0, 3, 6, 9, 12])
UNREAD = {
    "flash_attn_kwargs": {"cu_seq_lens_q": OFFSETS},
    "packed_seq_params": SimpleNamespace(cu_seqlens_q=OFFSETS),
    "attn_kwargs": {"cu_seq_lens_q": OFFSETS},
    "packed_seq_lens": [[3, 3], [3, 3]],
    "cu_seqlens_padded": OFFSETS,
    "seqlens_in_batch": torch.tensor([3, 3, 3, 3]),
    "example_ids": (RESTARTING == 0).cumsum(1),
    "sequence_ids": (RESTARTING == 0).cumsum(1),
}
CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "model": lambda model, batch: model(**batch),
    "decoder": lambda model, batch: model.model(**{name: x for name, x in batch.items() if name != "labels"}),
    "step": lambda model, batch: torch_backend.make_train_step(model, torch.optim.SGD(model.parameters()))([batch]),
    "logprobs": torch_backend.token_logprobs,
    "loss": causal_lm_loss,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", UNREAD)
def test_a_keyword_that_nothing_in_the_model_reads_is_refused(name: str, call: str) -> None:
    ids = torch.stack(documents((6, 6)))
    batch = {"input_ids": ids, "labels": ids.clone(), name: UNREAD[name]}
    with pytest.raises(LayoutError, match=name):
        CALLS[call](patched(), batch)


@pytest.mark.parametrize("family", ["qwen3", "mamba2", "falcon_alibi", "gpt2", "lfm2"])
def test_the_set_of_keywords_is_closed_in_every_kind_of_family(family: str) -> None:
    ids = torch.stack(documents((6, 6)))
    with pytest.raises((LayoutError, TypeError), match="attn_kwargs"):
        patched(family)(input_ids=ids, attn_kwargs={"cu_seq_lens_q": OFFSETS})


def test_a_list_beside_boundaries_is_refused_too() -> None:
    batch = {"input_ids": torch.stack(documents((6, 6))), "cu_seq_lens_q": torch.tensor([0, 6, 12])}
    with pytest.raises(UnsupportedModelError, match="packed_seq_lens"):
        patched()(**batch, packed_seq_lens=[[3, 3], [3, 3]])


def test_flags_and_keywords_that_transformers_reads_are_left_alone() -> None:
    ids = torch.stack(documents((6, 6)))
    patched()(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(4), output_hidden_states=True, task="chat")
