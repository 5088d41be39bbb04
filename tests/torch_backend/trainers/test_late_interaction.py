"""enable_packing with sentence-transformers' trainer of late interaction, which scores the tokens of each text."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import error
from tests.torch_backend.sentence_trainers import TRIPLETS, arguments, assert_same_step, folder, packed
from torch_backend.trainers.enable_packing import enable_packing

st = pytest.importorskip("sentence_transformers", reason="the trainers are those of sentence-transformers")

from sentence_transformers.base.modules import Transformer  # noqa: E402
from sentence_transformers.multi_vector_encoder import losses, modules  # noqa: E402

LOSSES = {
    "negatives": (losses.MultiVectorMultipleNegativesRankingLoss, 2),  # queries, documents
    "cached": (partial(losses.CachedMultiVectorMultipleNegativesRankingLoss, mini_batch_size=2), None),
}


def late(
    path: Any, loss: Any = losses.MultiVectorMultipleNegativesRankingLoss, family: str = "bert", **knobs: Any
) -> Any:
    model = st.MultiVectorEncoder(
        modules=[Transformer(folder(path, family), **knobs), modules.MultiVectorMask(skiplist_words=["w3", "w7"])]
    ).double()
    args = arguments(st.MultiVectorEncoderTrainingArguments, path)
    return st.MultiVectorEncoderTrainer(model, args, TRIPLETS(), loss=loss(model))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("name", LOSSES)
def test_tokens_are_scored_as_in_padded_columns(tmp_path: Any, name: str, family: str) -> None:
    loss, calls = LOSSES[name]
    ours, theirs = (late(tmp_path, loss, family) for _ in range(2))
    assert_same_step(ours, theirs, calls)
    texts = ["w1 w2 w3", "w4"]
    for got, want in zip(ours.model.encode(texts), theirs.model.encode(texts), strict=True):
        assert error(torch.as_tensor(got), torch.as_tensor(want)) <= 1e-7


def test_queries_are_extended_by_tokens_that_are_attended(tmp_path: Any) -> None:
    expansion = {"strategy": "fixed", "attend": True, "length": 32, "token": "[MASK]"}
    ours, theirs = (late(tmp_path, query_expansion=expansion) for _ in range(2))
    assert_same_step(ours, theirs, 2)


def test_the_audit_judges_late_interaction(tmp_path: Any) -> None:
    trainer = late(tmp_path)
    assert torch_backend.audit(trainer).verdict == "exact"
    report = torch_backend.audit(packed(trainer))
    assert report.verdict == "exact" and report.rows == 2, str(report)


def test_tokens_that_are_scored_and_not_attended_are_refused(tmp_path: Any) -> None:
    expansion = {"strategy": "fixed", "attend": False, "length": 32, "token": "[MASK]"}
    trainer = late(tmp_path, query_expansion=expansion)
    with pytest.raises(UnsupportedModelError, match='attention leaves out.*pass "attend": True in query_expansion'):
        enable_packing(trainer)
