"""Embeddings on two ranks whose losses gather negatives from both: the update is that of one large padded batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_backend
from tests.torch_backend.models import error
from tests.torch_backend.ranks import everyones, on_ranks
from tests.torch_backend.sentence_trainers import TOLERANCE, TRIPLETS, Step, embedder, embedding_trainer, packed

st = pytest.importorskip("sentence_transformers", reason="the trainers are those of sentence-transformers")

from sentence_transformers.base.losses import column_merging_disabled  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

pytestmark = pytest.mark.slow  # starts processes that train
LOSSES = {
    "plain": losses.MultipleNegativesRankingLoss,
    "cached": partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=3),
    "cached by tokens": partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=2, mini_batch_num_tokens=40),
}


def build(name: str, folder: Path, batch: int, **options: Any) -> Any:
    """A trainer of two steps of SGD in float64, over 16 triplets."""
    options |= {"per_device_train_batch_size": batch, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    options["use_cpu"] = True
    loss = partial(LOSSES[name], gather_across_devices=True)
    return embedding_trainer(folder, embedder(folder), loss, TRIPLETS(count=16), **options)


def trained(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return {
        "model": trainer.model.state_dict(),
        "losses": [x["loss"] for x in trainer.state.log_history if "loss" in x],
    }


def on_rank(name: str, folder: Path) -> dict[str, Any]:
    trainer = packed(build(name, folder, 4))
    return trained(trainer) | {"parts": trainer.packed_step.parts}


@pytest.mark.parametrize("name", LOSSES)
def test_negatives_of_both_ranks_train_as_one_large_batch(name: str, tmp_path: Path) -> None:
    alone = build("plain", tmp_path, 8)
    ranks = on_ranks(on_rank, name, tmp_path)
    before = {key: x.clone() for key, x in alone.model.state_dict().items()}
    want = trained(alone)
    assert ranks["losses"] == pytest.approx(want["losses"], rel=1e-6) and len(want["losses"]) == 2
    for key, weight in want["model"].items():
        assert error(ranks["model"][key], weight) <= TOLERANCE, key
    assert any(not torch.equal(weight, before[key]) for key, weight in want["model"].items())
    assert ranks["parts"]["columns"].startswith("3 of the last batch") == (name == "plain")


def with_dropout(trainer: Any) -> Any:
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return trainer


def worst_with_dropout(folder: Path) -> float:
    """Returns how far the gradients of a cached loss, packed, are from those of one forward of the same rows."""
    LOSSES["cached whole"] = partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4)
    cached = packed(with_dropout(build("cached whole", folder, 4)))
    plain = with_dropout(build("plain", folder, 4))
    torch_backend.unpad(plain.model, verify=False)
    with column_merging_disabled():  # the same rows, one for each column
        want = Step(plain)
    got = Step(cached)
    scale = max(float(g.abs().max()) for g in want.gradients.values())
    gradients = [float((got.gradients[name] - g).abs().max()) / scale for name, g in want.gradients.items()]
    return max(everyones(max(gradients)))


def test_cached_losses_repeat_the_dropout_of_each_rank(tmp_path: Path) -> None:
    build("plain", tmp_path, 4)  # writes the model
    assert on_ranks(worst_with_dropout, tmp_path) <= TOLERANCE
