"""Refusals of trainers whose documents are cut over ranks, and the angles of a rank's pieces, without processes.

``test_context_trainer`` and ``test_context_parallel`` train over ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from packing_core.errors import UnsupportedModelError
from tests.torch_backend.context_parallel.test_rank_share import shares
from tests.torch_backend.hf.test_conditions import model_of
from tests.torch_backend.models import tiny
from tests.torch_backend.vision_models import vision_model
from torch_backend import patch
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.edits import rotary
from torch_backend.hf.inputs.context import refuse_context
from torch_backend.hf.patch import state_of
from torch_backend.hf.unpadding import unpad_calls
from torch_backend.trainers import over_ranks

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "metrics": ({"compute_metrics": len}, "no rank has the logits of whole ones: leave compute_metrics"),
    "logits": ({"preprocess_logits_for_metrics": len}, "no rank has the logits of whole ones"),
    "NEFTune": ({"neftune_noise_alpha": 5.0}, "NEFTune's noise depends on their lengths: leave neftune_noise_alpha"),
    "counts": (
        {"average_tokens_across_devices": False},
        "their targets are counted on all ranks: leave average_tokens",
    ),
    "torch_compile": ({"torch_compile": True}, "their pieces differ in every batch: leave torch_compile out"),
    "seen tokens": (
        {"include_num_input_tokens_seen": "all"},
        "in this transformers each rank would count all of their tokens: leave include_num_input_tokens_seen out",
    ),
    "DeepSpeed": ({"is_deepspeed_enabled": True}, "DeepSpeed averages gradients over ranks of its own choice: use DDP"),
    "tensors": ({"tp_enabled": True, "tp_size": 2}, "tensor parallelism beside it is not tested: leave tp_size=2 out"),
}


def reason(fast: bool = True, not_known: str | None = None, **changes: Any) -> str | None:
    settings = {
        "compute_metrics": None, "preprocess_logits_for_metrics": None, "is_deepspeed_enabled": False,
        "include_num_input_tokens_seen": "no",
        "neftune_noise_alpha": None, "average_tokens_across_devices": True, "torch_compile": False, "tp_enabled": False,
    } | changes  # fmt: skip
    one: Any = SimpleNamespace(**settings)  # the trainer, its arguments and its parallelism in one
    one.args, one.accelerator = one, SimpleNamespace(parallelism_config=one)
    loss: Any = SimpleNamespace(why_not_known=lambda: not_known)
    return over_ranks.why_not_rows(one, loss, fast=fast) or over_ranks._why_not_arguments(one)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_documents_is_named(name: str) -> None:
    changes, message = REFUSED[name]
    assert (reason(**changes) or "").startswith(message)
    assert reason() is None


def test_a_loss_with_logits_and_the_trainers_own_step_are_named() -> None:
    named = "every rank computes its part of the loss without the logits of others: it has metrics of its own"
    assert reason(not_known="it has metrics of its own") == named
    assert reason(fast=False) == "the trainer's own step runs whole ones: leave fast=False out"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_angles_of_a_piece_are_those_of_its_whole_document(rank: int) -> None:
    """LongRoPE takes other frequencies for documents of more than 24 tokens: 40 and 31 here, not 7."""
    lengths = [40, 7, 31]
    share = shares(lengths, 2, contiguous=False)[rank]
    module = model_of("phi3").model.rotary_emb
    positions = torch.from_numpy(share.positions)[None]
    found = rotary._of_pieces(module, module.forward, share, (torch.zeros(1, positions.numel(), 8), positions), {})
    whole = {n: module(torch.zeros(1, n, 8), torch.arange(n)[None]) for n in lengths}
    assert not torch.equal(whole[40][0][:, :7], whole[7][0])
    at = positions[0].split(share.lengths)
    for x, part in zip(found, (0, 1), strict=True):
        wanted = [whole[n][part][:, places] for n, places in zip(share.document_lengths, at, strict=True)]
        torch.testing.assert_close(x, torch.cat(wanted, 1), rtol=0, atol=0)


@pytest.mark.parametrize(("family", "refused"), [("paligemma", True), ("gemma3", False)])
def test_models_whose_documents_begin_with_a_prefix_are_not_cut(family: str, refused: bool) -> None:
    """Text trains a Gemma 3 over ranks, and its images are refused with the batch; a PaliGemma has no such text."""
    anatomy = anatomy_of(vision_model(family))
    if not refused:
        assert refuse_context(anatomy) is None
        return
    with pytest.raises(UnsupportedModelError, match="tokens of a document's prefix see each other both ways"):
        refuse_context(anatomy)


def test_models_that_skip_layers_at_random_are_not_cut() -> None:
    """Otherwise a rank that skips a layer exchanges tokens of the next one while others exchange those of this one."""
    assert refuse_context(anatomy_of(tiny("opt"))) is None
    with pytest.raises(
        UnsupportedModelError, match=r"skips layers at random, .* different ones \(load it with layerdro"
    ):
        refuse_context(anatomy_of(tiny("opt", layerdrop=0.1)))


def test_padded_calls_that_ask_for_more_than_log_probabilities_are_refused() -> None:
    model: Any = patch(tiny("qwen3"), verify=False)
    unpad_calls(model, always=True)
    state_of(model).context = Mock()
    with pytest.raises(UnsupportedModelError, match=r"a padded call runs packed, and its documents are cut over ranks"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4, dtype=torch.long))
