"""Two ranks of ``torchrun`` and one process train the same documents to the same weights, whoever holds which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packing_core import plan
from tests.torch_backend.test_trainer import CAPACITY, documents
from tests.torch_backend.torchrun import torchrun
from tests.torch_backend.torchrun_training import DOCUMENTS


def train(folder: Path, ranks: int, rows_at_once: int, accumulation: int) -> dict:
    folder.mkdir()
    torchrun("torchrun_training.py", str(folder), str(rows_at_once), str(accumulation), ranks=ranks)
    return torch.load(folder / "result.pt")


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """A step has 8 rows: 2 ranks x 2 rows x 2 microbatches, or 1 process x 4 rows x 2 microbatches."""
    pytest.importorskip("datasets", reason="the documents come as a datasets.Dataset")
    two, one = train(tmp_path / "two", 2, 2, 2), train(tmp_path / "one", 1, 4, 2)
    data = documents(DOCUMENTS)
    rows = plan([len(ids) for ids in data["input_ids"]], CAPACITY, strategy="sequential", seed=None).to_lists()
    trained = [sum(label != -100 for label in labels[1:]) for labels in data["labels"]]
    targets = [sum(trained[d] for row in rows[a : a + 8] for d in row) for a in (0, 8)]
    assert len(rows) == 16
    assert list(two["counts"][:2]) == list(one["counts"][:2]) == targets
    for name, weight in one["model"].items():
        largest = float(weight.abs().max())
        assert float((two["model"][name] - weight).abs().max()) <= 1e-6 * max(largest, 1.0), name
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
