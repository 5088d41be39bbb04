"""Problems that users of other packers report in their issue trackers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from packing_core import pack, plan
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, patched, tiny
from torch_backend import patch, with_boundaries

SHORT = (5, 1, 14)


def test_nothing_is_nan_beside_documents_of_one_token() -> None:
    docs = documents((1, 1, 7, 1))
    run = packed(patched("qwen3_5_text"), docs, collate(docs, capacity=16))  # the rest of the row is padding
    assert all(bool(torch.isfinite(value).all()) for value in (*run.logits, run.loss, *run.gradients.values()))


def test_positions_padded_to_a_multiple_are_exact() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model, docs = patched("gemma3_text"), documents(SHORT)
    collator = with_boundaries(DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=16), model)
    batch = collator([{"input_ids": document.tolist()} for document in docs])
    assert batch["input_ids"].shape == (1, 32)
    assert_same(packed(model, docs, batch), alone(model, docs))


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
def test_stock_attention_is_exact_when_patched(stock: str) -> None:
    model, docs = tiny("qwen3"), documents(SHORT)
    model.set_attn_implementation(stock)
    want = alone(model, docs)
    assert_same(packed(patch(model, verify=False), docs), want)


def test_documents_stay_whole_unless_asked() -> None:
    lengths = [7, 5, 6, 3, 8, 2]  # | 7 3 | 5 .. | ..: rows of 10, whose ends cut no document
    made = plan(lengths, 10)
    assert sorted(made.length.tolist()) == sorted(lengths) and not made.start.any()


def test_documents_of_one_token_stay_apart() -> None:
    positions = torch.tensor([[0, 0, 0, 1, 0]])
    batch: Any = with_boundaries(dict)({"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": positions})
    assert batch["packed_lengths"] == (1, 1, 2, 1)
    assert (
        pack([[5], [6], [7, 8], [9]], 5, strategy="sequential", seed=None).position_ids.tolist() == positions.tolist()
    )


def test_trl_computes_the_loss_of_grpo_itself() -> None:
    source = (Path(find_spec("trl").submodule_search_locations[0]) / "trainer" / "grpo_trainer.py").read_text()
    assert "def _compute_loss" in source and "liger_kernel.chunked_loss" not in source
