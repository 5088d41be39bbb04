"""Two ranks of ``torchrun`` and one process train the same documents to the same weights, whoever holds which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torch_backend.test_trainer import documents
from tests.torch_backend.torchrun import torchrun


def train(folder: Path, ranks: int, documents_at_once: int, accumulation: int) -> dict:
    folder.mkdir()
    torchrun("torchrun_training.py", str(folder), str(documents_at_once), str(accumulation), ranks=ranks)
    return torch.load(folder / "result.pt")


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """A step has 8 documents: 2 ranks x 2 documents x 2 microbatches, or 1 process x 4 documents x 2 microbatches."""
    pytest.importorskip("datasets", reason="the documents come as a datasets.Dataset")
    two, one = train(tmp_path / "two", 2, 2, 2), train(tmp_path / "one", 1, 4, 2)
    targets = [sum(x != -100 for row in documents(16)["labels"][a : a + 8] for x in row[1:]) for a in (0, 8)]
    assert list(two["counts"][:2]) == list(one["counts"][:2]) == targets
    for name, weight in one["model"].items():
        largest = float(weight.abs().max())
        assert float((two["model"][name] - weight).abs().max()) <= 1e-6 * max(largest, 1.0), name
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
