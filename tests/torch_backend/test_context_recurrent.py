"""Recurrences that hand their states on between the pieces of a document on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.torchrun import assert_same_loss, torchrun
from tests.torch_backend.torchrun_context import run
from tests.torch_backend.torchrun_context_recurrent import FROZEN, LONG, MODELS, ROWS, scanned

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
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Our scans over pieces of several chunks, by interpreted kernels."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        return results(tmp_path_factory.mktemp("long"), "long", 2)


@pytest.mark.parametrize("name", LONG)
def test_our_scans_of_long_pieces_are_those_of_whole_documents(long: dict[str, Any], name: str) -> None:
    assert not isinstance(long[name], str), long[name]
    for many, one in zip(long[name]["over ranks"]["values"], long[name]["whole"], strict=True):
        assert float((many - one).abs().max()) <= 1e-6 * float(one.abs().max())


CARRY = {"carry", "carry_backward"}  # kernels that carry states from chunk to chunk


@pytest.mark.parametrize("name", LONG)
def test_our_scans_keep_no_more_over_ranks_and_run_their_kernels_once(long: dict[str, Any], name: str) -> None:
    many, one = long[name]["over ranks"], long[name]["without ranks"]
    assert many["bytes"] <= one["bytes"] + long[name]["state"]
    once = {kernel: 2 * count for kernel, count in one["launched"].items()}  # documents alone, and pieces
    assert many["launched"] == {kernel: count + (kernel in CARRY) for kernel, count in once.items()}
