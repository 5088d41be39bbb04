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
from torch_backend.context_parallel.group import draws_of_rank
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.edits import rotary
from torch_backend.hf.inputs.context import refuse_context
from torch_backend.hf.patch import state_of
from torch_backend.hf.unpadding import unpad_calls
from torch_backend.trainers import over_ranks
from torch_backend.trainers.changes import Changes

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


def test_ranks_that_are_seeded_alike_draw_other_numbers_and_go_on_alike() -> None:
    inside, afterwards = [], []
    for share in shares([40, 7, 31], 2, contiguous=False):
        torch.manual_seed(5)
        for _ in range(2):
            with draws_of_rank(share):
                inside.append(torch.rand(3))
        afterwards.append(torch.rand(3))
    assert len({tuple(draw.tolist()) for draw in inside}) == 4
    assert torch.equal(*afterwards)


def test_a_trainer_over_ranks_counts_the_targets_of_a_step_and_leaves_smoothing_to_it() -> None:
    trainer = Mock(label_smoother=SimpleNamespace(epsilon=0.1))
    trainer.model_accepts_loss_kwargs = False  # by which transformers counts
    assert over_ranks.OverRanks(Changes(trainer), Mock()).smoothing == 0.1
    assert trainer.model_accepts_loss_kwargs is True and trainer.label_smoother is None


@pytest.mark.parametrize(("last", "documents"), [(False, 6), (True, 2)])
def test_an_evaluation_of_two_groups_weighs_the_mean_of_both_by_the_documents(last: bool, documents: int) -> None:
    """Two groups of two ranks with batches of three documents; of the last batch, two are left and four repeated."""
    parts = torch.tensor([8.0, 8.0, 2.0, 2.0])  # of the loss of a batch, whose mean over all ranks is that loss
    state = SimpleNamespace(end_of_dataloader=last, remainder=2)
    accelerator = SimpleNamespace(gather=lambda losses: parts.repeat_interleave(len(losses)), gradient_state=state)
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    over_ranks.gather_means(trainer, 2)
    assert trainer.gather_function(torch.full((3,), 8.0)).tolist() == [5.0] * documents


class _Accelerator:
    """Four ranks in two groups, of which the second one has ten more."""

    num_processes = 4

    def gather(self, found: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.atleast_1d(found) + 10 * (rank // 2) for rank in range(4)])


@pytest.mark.parametrize("value", [torch.tensor(1), torch.tensor([1, 2]), torch.tensor([[1], [2]])])
def test_what_a_preference_trainer_gathers_is_that_of_each_group_once(value: torch.Tensor) -> None:
    accelerator = _Accelerator()
    trainer = Mock(accelerator=accelerator, compute_loss=lambda *_: accelerator.gather(value))
    over_ranks.ScoresOverRanks(Changes(trainer), 2)
    value = torch.atleast_1d(value)
    assert torch.equal(trainer.compute_loss(None, {}), torch.cat([value, value + 10]))
    assert len(accelerator.gather(value)) == 4 * len(value), "outside of its loss it gathers of all ranks"


def test_operations_and_inputs_of_a_group_count_once() -> None:
    trainer = Mock(floating_point_ops=lambda inputs: 8 * inputs, state=SimpleNamespace(num_input_tokens_seen=3))

    def track(inputs: int) -> None:
        trainer.state.num_input_tokens_seen += 4 * inputs

    trainer._track_num_input_tokens = track
    over_ranks.prepare_for_groups(Changes(trainer), 4)
    trainer._track_num_input_tokens(5)
    assert (trainer.floating_point_ops(1), trainer.state.num_input_tokens_seen) == (2, 8)


def test_padded_calls_that_ask_for_more_than_log_probabilities_are_refused() -> None:
    model: Any = patch(tiny("qwen3"), verify=False)
    unpad_calls(model, always=True)
    state_of(model).context = Mock()
    with pytest.raises(UnsupportedModelError, match=r"a padded call runs packed, and its documents are cut over ranks"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4, dtype=torch.long))
