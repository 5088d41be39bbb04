"""The examples run as they stand, and print what their comments claim."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str) -> str:
    result = processes.run([sys.executable, str(EXAMPLES / name)])
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"torch_loop.py", "ranks.py"}


def test_a_torch_loop_learns_on_packed_rows():
    text = output("torch_loop.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) > 5
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # log of the vocabulary
    assert "attention -> " in text


def test_ranks_finish_together_and_a_stream_goes_on_with_fewer_of_them():
    text = output("ranks.py")
    assert float(re.search(r"slowest rank over mean ([\d.]+)", text).group(1)) < 1.05
    assert "the same as without the stop: True" in text
