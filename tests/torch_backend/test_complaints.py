"""Problems that users of other packers report: ``docs/complaints.md`` names a test for each; these had none."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from packing_core import pack, plan
from packing_core.errors import CapacityError
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, patched, tiny
from torch_backend import PackedCollator, patch, with_boundaries

ROOT = Path(__file__).parents[2]
SHORT = (5, 1, 14)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])
def test_hybrids_are_exact(family: str) -> None:
    model, docs = patched(family), documents(SHORT)
    assert_same(packed(model, docs), alone(model, docs))


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


def test_a_mask_of_ones_changes_nothing() -> None:
    model, docs = patched("qwen3"), documents(SHORT)
    batch = collate(docs, capacity=None)
    masked = packed(model, docs, batch | {"attention_mask": torch.ones_like(batch["input_ids"])})
    assert_same(masked, packed(model, docs, batch), tolerance=0.0)


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


def test_a_document_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(CapacityError, match="document 1 has 9 tokens and capacity is 8"):
        PackedCollator(capacity=8)([{"input_ids": [5] * n} for n in (3, 9)])


def test_documents_of_one_token_stay_apart() -> None:
    positions = torch.tensor([[0, 0, 0, 1, 0]])
    batch: Any = with_boundaries(dict)({"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": positions})
    assert batch["packed_lengths"] == (1, 1, 2, 1)
    assert (
        pack([[5], [6], [7, 8], [9]], 5, strategy="sequential", seed=None).position_ids.tolist() == positions.tolist()
    )


def test_trl_computes_the_loss_of_grpo_itself() -> None:
    source = (Path(find_spec("trl").submodule_search_locations[0]) / "trainer" / "grpo_trainer.py").read_text()
    assert "def _compute_loss" in source and "liger_kernel.chunked_loss" not in source, "see 17 on the page"


def test_the_page_names_a_test_that_exists_for_each_of_them() -> None:
    page = (ROOT / "docs" / "complaints.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \| .* \| \[(\S+)\]\(\.\./(\S+)\) \|$", page, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 33))
    for number, links, test, file in rows:
        assert re.search(r"\(https://github\.com/[\w.-]+/[\w.-]+/issues/\d+\)", links), number
        functions = [
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert test == file or test in functions, f"{number}: {file} has no {test}"
