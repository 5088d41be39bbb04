"""A DPO step of a wrapped model: two processes with unequal shares of the pairs have the gradients of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.torch_backend.losses.test_distributed_loss import CASES, assert_same_gradients, unsynchronised
from tests.torch_backend.models import collate, documents
from tests.torch_backend.wrappers import Model, gradients
from torch_backend import normalise, reduce, token_logprobs
from torch_backend.losses.preference import dpo_loss

pytestmark = pytest.mark.slow  # starts processes that train

# Lengths of the chosen and the rejected document of each pair; by rank, by micro-batch.
PAIRS = [[[(5, 19), (33, 7)], [(40, 3)]], [[(9, 30)], [(4, 21)]]]


def preferences(model: Model, shares: int, share: int) -> Iterator[dict[str, Tensor]]:
    """The gradients of the mean DPO loss over all pairs, with a little of each document's mean entropy."""
    everything = [[pair for rank in PAIRS for microbatch in rank for pair in microbatch]]
    microbatches = everything if shares == 1 else PAIRS[share]
    pairs = torch.tensor(float(sum(map(len, microbatches))))
    for number, lengths in enumerate(microbatches):
        batch = collate([doc for pair in lengths for doc in documents(pair, seed=sum(pair))], capacity=64)
        with model.no_sync() if unsynchronised(model, number, len(microbatches)) else nullcontext():
            found = token_logprobs(model, batch, entropy=True)
            sums = reduce(found.logprobs, batch, "sum")
            spread = reduce(found.entropy, batch, "mean", where=batch["labels"] != -100).view(-1, 2).sum(1)
            losses = dpo_loss(sums[::2], sums[1::2], beta=0.3) - 0.1 * spread
            normalise(losses.sum(), pairs).backward()
    yield gradients(model)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("tensor parallel", "accelerate")])
def test_two_processes_have_the_gradients_of_one(case: str) -> None:
    assert_same_gradients(case, preferences)
