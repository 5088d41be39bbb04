"""Parameters sharded over two ranks that hold different documents: exact, or refused before anything can hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.torch_backend.torchrun import torchrun

pytestmark = pytest.mark.slow  # starts processes that train

ORDERS = ("shard, patch", "patch, shard")


def test_fsdp2_on_every_route(tmp_path: Path) -> None:
    """The mixers of Mamba and Jamba run per document inside of what is sharded; Bloom's decoder around it."""
    torchrun("torchrun_sharded.py", "qwen3,bamba,mamba,bloom,jamba", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    for order in ORDERS:
        for family in ("qwen3", "bamba", "mamba", "jamba"):
            assert found[f"{family}: {order}"] <= 1e-6, (family, order, found)
        assert "is sharded by FSDP, and " in str(found[f"bloom: {order}"]), (order, found)
