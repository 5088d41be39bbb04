"""audit(trainer) of sentence-transformers' trainers: what the library does, what packing does, and planted leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torch_backend
from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.scored_trainers import dpo
from tests.torch_backend.sentence_trainers import LOSSES, TRIPLETS, embedder, embedding_trainer, packed, rows
from tests.torch_backend.trainers.test_embedding_trainers import PAIR_LOSSES, reranker
from torch_backend.hf import unpadding
from torch_backend.trainers.enable_packing import enable_packing

pytest.importorskip("sentence_transformers", reason="the trainers are those of sentence-transformers")

from sentence_transformers.sentence_transformer import losses

NEGATIVES = losses.MultipleNegativesRankingLoss


def trainer_of(path: Any, loss: str = "multiple negatives", family: str = "bert") -> Any:
    kind, data, _ = LOSSES[loss]
    trainer = embedding_trainer(path, embedder(path, family), kind, data())
    if loss == "layers":
        trainer.model[0].model.config.output_hidden_states = True
    return trainer


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_columns_are_exact_padded_and_packed(tmp_path: Any, loss: str) -> None:
    trainer = trainer_of(tmp_path, loss)
    stock = torch_backend.audit(trainer)
    assert stock.verdict == "exact" and stock.documents >= 8, str(stock)
    assert stock.rows == stock.documents // (2 if loss == "layers" else 1)  # whose losses of layers share a forward
    report = torch_backend.audit(packed(trainer))
    assert report.verdict == "exact" and report.documents == stock.documents, str(report)
    assert report.rows == 1 if LOSSES[loss][2] == 1 else report.rows < stock.rows
    assert report.leak == report.noise == 0 and report.moved > 0.1 and report.gradients < 1e-6


@pytest.mark.parametrize("family", ["modernbert", "qwen3"])
def test_other_encoders(tmp_path: Any, family: str) -> None:
    report = torch_backend.audit(packed(trainer_of(tmp_path, family=family)))
    assert report.verdict == "exact" and report.rows == 1, str(report)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_rerankers_are_exact_padded_and_packed(tmp_path: Any, name: str) -> None:
    loss, data = PAIR_LOSSES[name]
    trainer = reranker(tmp_path, loss, data())
    stock = torch_backend.audit(trainer)
    assert stock.verdict == "exact" and stock.rows == stock.documents >= 4, str(stock)
    report = torch_backend.audit(packed(trainer))
    assert report.verdict == "exact" and report.rows < stock.rows, str(report)


# -- what the packed calls of sentence-transformers' and TRL's trainers have in common ---------------------------------

PACKED = {
    "embeddings": lambda path: packed(trainer_of(path)),
    "preferences": lambda path: enable_packing(dpo(path), verify=False),
}


@pytest.mark.parametrize("kind", PACKED)
def test_rows_without_boundaries_are_found(tmp_path: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, stock = PACKED[kind](tmp_path), unpadding.Unpadding.take_out

    def lost(self: Any, kwargs: Any) -> Any:
        padded, kwargs = stock(self, kwargs)
        if "packed_lengths" in kwargs:
            kwargs["packed_lengths"] = (sum(kwargs["packed_lengths"]),)
        return padded, kwargs

    monkeypatch.setattr(unpadding.Unpadding, "take_out", lost)
    report = torch_backend.audit(trainer)
    assert report.verdict == "contaminated" and report.leak > 0.01, str(report)


@pytest.mark.parametrize("kind", PACKED)
def test_tokens_at_the_wrong_place_are_found(tmp_path: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, stock = PACKED[kind](tmp_path), unpadding.Padded.back
    monkeypatch.setattr(unpadding.Padded, "back", lambda self, x: stock(self, x.roll(1, 1)))
    assert torch_backend.audit(trainer).verdict == "contaminated"


def test_the_trainer_is_as_it_was(tmp_path: Any) -> None:
    trainer = packed(trainer_of(tmp_path))
    attributes, states = dict(trainer.__dict__), (torch.get_rng_state(), random.getstate())
    torch_backend.audit(trainer)
    assert trainer.__dict__ == attributes and states[1] == random.getstate()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.model[0]._forward_hooks and "forward" in vars(trainer.model[0])


def test_equal_texts_have_nothing_to_judge(tmp_path: Any) -> None:
    class Nothing(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, features: Any, labels: Any) -> Any:
            return 1 + 0 * sum(self.model(column)["sentence_embedding"].sum() for column in features)

    with pytest.raises(PackingError, match="every gradient of its texts is 0: give it texts and labels that differ"):
        torch_backend.audit(embedding_trainer(tmp_path, embedder(tmp_path), Nothing, TRIPLETS()))


def test_rows_that_the_library_makes_itself_are_refused(tmp_path: Any) -> None:
    trainer = embedding_trainer(tmp_path, embedder(tmp_path), NEGATIVES, rows("anchor", "positive"))
    stock = trainer.collect_features

    def numbered(inputs: Any) -> Any:
        features, labels = stock(inputs)
        for column in features:
            column["position_ids"] = torch.arange(column["input_ids"].shape[1]).expand_as(column["input_ids"])
        return features, labels

    trainer.collect_features = numbered
    with pytest.raises(UnsupportedError, match="BertModel on rows that it has packed itself"):
        torch_backend.audit(trainer)
