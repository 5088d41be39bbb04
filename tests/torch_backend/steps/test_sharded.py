"""Parameters sharded over two ranks that hold different documents: exact, or refused before anything can hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.torch_backend.models import alone, collate, documents, error, in_float64, tiny
from tests.torch_backend.ranks import on_ranks, refused
from tests.torch_backend.wrappers import plain, shard

pytestmark = pytest.mark.slow  # starts processes that train

DOCUMENTS = [documents((5, 19, 33), seed=1), documents((7, 40, 1, 2, 18), seed=2)]  # of each rank


def targets(docs: list[Tensor]) -> int:
    return sum(len(document) - 1 for document in docs)


def backward(model: Any) -> None:
    own = DOCUMENTS[dist.get_rank()]
    everything = [document for docs in DOCUMENTS for document in docs]
    (model(**collate(own)).loss * targets(own) * dist.get_world_size() / targets(everything)).backward()


def worst_error(family: str, first: str) -> float:
    """The worst relative error of a gradient against one process, of a model sharded before the patch or after it."""
    want = alone(in_float64(tiny(family)), [document for docs in DOCUMENTS for document in docs]).gradients
    model = in_float64(tiny(family))
    model = plain(shard(model)) if first == "shard" else shard(plain(model))
    backward(model)
    return max(error(p.grad.full_tensor(), want[name]) for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("family", "first"),
    [
        ("qwen3", "shard"),
        ("qwen3", "patch"),
        ("bamba", "shard"),
        ("mamba", "patch"),
        ("jamba", "shard"),
        ("bloom", "patch"),
    ],
)
def test_fsdp2_on_every_route(family: str, first: str) -> None:
    """The mixers of Mamba and Jamba run per document inside of what is sharded."""
    assert on_ranks(worst_error, family, first) <= 1e-6


@pytest.mark.parametrize("first", ["shard", "patch"])
def test_a_decoder_that_runs_per_document_is_not_sharded(first: str) -> None:
    assert all("is sharded by FSDP, and " in text for text in refused(worst_error, "falcon_alibi", first))
