"""Recurrences that hand their states on between the pieces of a document on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.torchrun import assert_same_loss, torchrun
from tests.torch_backend.torchrun_context import run
from tests.torch_backend.torchrun_context_recurrent import COSTS, FROZEN, MODELS, ROWS, scanned

pytestmark = pytest.mark.slow  # starts processes


def results(folder: Path, part: str, ranks: int, **options: Any) -> dict[str, Any]:
    torchrun("torchrun_context_recurrent.py", str(folder / "results.pt"), part, ranks=ranks, **options)
    found: dict[str, Any] = torch.load(folder / "results.pt")
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_scans_over_ranks_are_those_of_whole_documents(tmp_path: Path, ranks: int) -> None:
    found = results(tmp_path, "scans", ranks)
    for name in [*ROWS, FROZEN]:
        one, many = scanned(name), found[name]
        assert not isinstance(many, str), (name, many)  # the text of an error
        assert (many.pop("straddles") > one.pop("straddles")) == (name != "none is cut"), name
        assert many.keys() == one.keys()
        for key, right in one.items():
            assert float((many[key] - right).abs().max()) <= 1e-12 * float(right.abs().max()), (name, key)


def test_our_scans_compute_over_ranks_what_each_document_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By interpreted kernels; one process runs each document by the modeling file, without kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = results(tmp_path, "models", 2, limit=220)
    for name, case in MODELS.items():
        one, many = run(case), found[name]
        assert_same_loss(many, one)
        assert "scan by Triton; straddling documents hand states on" in many["explained"]
        assert "scan by Triton" not in one["explained"] and many["tokens"] < one["tokens"]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By interpreted kernels: see ``torchrun_context_recurrent.costs``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        return results(tmp_path_factory.mktemp("costs"), "costs", 2)


WALKS = {"carry", "carry_backward"}  # kernels that walk over chunks alone


@pytest.mark.parametrize("name", COSTS)
def test_our_scans_keep_no_more_over_ranks_and_read_tokens_once(costs: dict[str, Any], name: str) -> None:
    assert not isinstance(costs[name], str), costs[name]
    many, one = costs[name]["across ranks"], costs[name]["without ranks"]
    assert many["bytes"] <= one["bytes"] + costs[name]["state"]
    once = {kernel: 2 * count for kernel, count in one["launched"].items()}  # documents alone, and pieces of the others
    assert {kernel: count for kernel, count in many["launched"].items() if kernel not in WALKS} == {
        kernel: count for kernel, count in once.items() if kernel not in WALKS
    }
    assert all(many["launched"][kernel] <= once[kernel] + 1 for kernel in WALKS)
