"""The board's perturbation test: what it calls exact, contaminated, refused and not run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import _board_flash, board
from benchmarks._board_page import html, markdown
from benchmarks._board_probe import Cell, each_alone, judge
from benchmarks._board_stacks import STACKS
from packing_core.reference import attention
from tests.torch_backend.models import patched, tiny
from torch_backend.auditing.compare import random_documents

LENGTHS, CAPACITY = (9, 14, 6), 32


@pytest.fixture
def flash() -> Iterator[None]:
    """The stand-in for flash-attn, taken out of transformers afterwards."""
    from transformers import modeling_flash_attention_utils as module

    names = ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn", "_loaded_implementation")
    before = {name: getattr(module, name) for name in names}
    _board_flash.register()
    yield
    for name, value in before.items():
        setattr(module, name, value)


def cell(stack: str, model: Any, **changes: Any) -> Cell:
    documents = random_documents(model, LENGTHS)

    def batches(lists: list[list[int]]) -> list[dict[str, Any]]:
        return [batch | changes for batch in STACKS[stack].batches(lists, CAPACITY, model)]

    return judge(model, documents, batches, each_alone(model, documents))


def test_our_own_batches_are_exact() -> None:
    assert cell("crosspack", patched("qwen3")).verdict == "exact"


def test_a_default_cache_hides_the_boundaries_of_a_flattened_batch_and_no_cache_shows_them() -> None:
    model = tiny("qwen3")
    leaking = cell("flattening", model)
    assert (
        leaking.verdict == "contaminated" and leaking.logits > 0.01 and leaking.text().startswith("contaminated: log")
    )
    assert cell("flattening", model, use_cache=False).verdict == "exact"


def test_a_first_token_that_is_trained_shows_in_the_loss_alone() -> None:
    model = tiny("qwen3")

    def batches(lists: list[list[int]]) -> list[dict[str, Any]]:
        batch = STACKS["flattening"].batches(lists, CAPACITY, model)[0]
        return [batch | {"labels": batch["input_ids"].clone(), "use_cache": False}]

    documents = random_documents(model, LENGTHS)
    found = judge(model, documents, batches, each_alone(model, documents))
    assert found.verdict == "contaminated" and found.logits < 1e-6 and found.text().startswith("contaminated: loss")


def test_labels_that_leave_trained_tokens_out_differ() -> None:
    model = patched("qwen3")
    documents = random_documents(model, LENGTHS)

    def batches(lists: list[list[int]]) -> list[dict[str, Any]]:
        batch = STACKS["crosspack"].batches(lists, CAPACITY, model)[0]
        batch["labels"][:, 5] = -100
        return [batch]

    assert judge(model, documents, batches, each_alone(model, documents)).verdict == "differs"


def test_flash_rows_are_exact_where_the_boundaries_are_right(flash: None) -> None:
    model = tiny("qwen3")
    model.set_attn_implementation(_board_flash.NAME)
    assert cell("flattening-flash", model).verdict == "exact"


@pytest.mark.parametrize(
    ("options", "reference"),
    [({}, {}), ({"window_size": (3, 0)}, {"window": 4}), ({"softcap": 2.0}, {"softcap": 2.0})],
    ids=["causal", "window", "softcap"],
)
def test_the_stand_in_of_flash_attention_is_the_oracle(options: dict[str, Any], reference: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(sum(LENGTHS), heads, 8, generator=generator, dtype=torch.float64)

    q, k, v = drawn(4), drawn(2), drawn(2)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    got = _board_flash.flash_attn_varlen_func(q, k, v, bounds, bounds, 14, 14, causal=True, **options)
    want = attention(q.numpy(), k.numpy(), v.numpy(), bounds.numpy(), causal=True, **reference)
    torch.testing.assert_close(got, torch.from_numpy(want), rtol=1e-12, atol=1e-12)


def test_what_a_stack_raises_is_the_cell() -> None:
    model = tiny("qwen3")

    def raising(lists: list[list[int]]) -> list[dict[str, Any]]:
        raise ValueError("needs a kernel\nand more")

    def missing(lists: list[list[int]]) -> list[dict[str, Any]]:
        raise ModuleNotFoundError("No module named 'numba'")

    documents = random_documents(model, LENGTHS)
    alone = each_alone(model, documents)
    assert judge(model, documents, raising, alone) == Cell("refused", reason="ValueError: needs a kernel")
    assert judge(model, documents, missing, alone).verdict == "not run"


def test_a_stack_that_is_not_installed_is_not_run(tmp_path: Any) -> None:
    line = board.run("axolotl", tmp_path, ["qwen3"])
    assert line.cells["qwen3"] == Cell("not run", reason="axolotl is not in --folder")


def test_the_pages_hold_every_cell_and_number_the_reasons() -> None:
    cells = {"qwen3": Cell("exact", seconds=1.0), "lfm2": Cell("refused", reason="ValueError: <kernel>")}
    lines = [
        board.Line("crosspack", "1", 1.0, 0.98, cells),
        board.Line(
            "slow", "2", 0.9, None, cells | {"qwen3": Cell("contaminated", logits=0.5, seconds=2.0)}, "its note"
        ),
    ]
    models = {"qwen3": "full attention", "lfm2": "convolution hybrid"}
    page = markdown(lines, models, date(2026, 1, 2))
    assert "contaminated: logits 0.5" in page and "refused [1]" in page and "1. `` ValueError: <kernel> ``" in page
    assert "- slow: its note." in page and "2026-01-02" in page
    assert "| slow" in page.partition("## Speed")[2] and "0.5" in page.partition("## Speed")[2]
    assert 'class="contaminated"' in html(lines, models, date(2026, 1, 2))
    assert "&lt;kernel&gt;" in html(lines, models, date(2026, 1, 2))
