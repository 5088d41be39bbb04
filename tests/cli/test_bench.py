"""``crosspack bench``: each way has a rate and a verdict, and a verdict against packing ends the command."""

from __future__ import annotations

import json
import random

import pytest
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from crosspack.cli import app
from crosspack.cli import bench as command
from crosspack.cli.bench import Measured
from packing_core.errors import ContaminationError, PackingError
from torch_backend.auditing.tiny import tiny_config
from torch_backend.training import bench as torch_bench

WAYS = ["padded", "stock packed", "crosspack"]


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "--seconds", "0", "--capacity", "96", *arguments])


@pytest.fixture
def records(write):
    draw = random.Random(0)
    texts = ("".join(draw.choices("abcdefgh ", k=length)) for length in (9, 60, 33, 50, 18, 40, 27, 70))
    return str(write("data.jsonl", [{"text": text} for text in texts]))


@pytest.mark.parametrize(
    ("family", "verdicts"),
    [
        ("llama", ["exact", "exact", "exact"]),
        ("gpt_oss", ["exact", "contaminated", "exact"]),  # never hands position_ids to its mask
    ],
)
def test_every_way_has_a_rate_and_a_verdict(tmp_path, records, family, verdicts):
    config = tiny_config(CONFIG_MAPPING[family](), head_dim=16, changes={"vocab_size": 512})
    config.save_pretrained(tmp_path)
    figures = tmp_path / "figures.json"
    result = run("--model", str(tmp_path / "config.json"), "--data", records, "--json", str(figures))
    assert result.exit_code == 0, result.output
    measured = json.loads(figures.read_text())
    assert [each["way"] for each in measured] == WAYS
    assert [each["verdict"] for each in measured] == verdicts
    assert all(each["tokens_per_second"] > 0 and each["failure"] == "" for each in measured)
    assert "1.00x" in result.output and "real tokens/s" in result.output


def test_what_one_step_waits_for_does_not_count(tmp_path, monkeypatch, records):
    """The rate is the median step's: here of 10 s, 1 s, 1 s, 600 s, 1 s the first warms up and the fourth compiles."""
    clock, durations = [0.0], iter([10.0, 1.0, 1.0, 600.0, 1.0] * len(WAYS))
    monkeypatch.setattr(torch_bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch_bench, "_wait", lambda device: clock.__setitem__(0, clock[0] + next(durations)))
    figures = tmp_path / "figures.json"
    result = run("--data", records, "--seconds", "602.5", "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert all(30 <= each["tokens_per_second"] <= 96 for each in json.loads(figures.read_text()))  # a row in 1 s


def told(monkeypatch, *measured: Measured) -> None:
    monkeypatch.setattr(command, "_racer", lambda backend: lambda job, seconds: iter(measured))


def test_packed_documents_that_see_each_other_end_the_command(monkeypatch, records):
    told(monkeypatch, Measured("padded", 10.0, None, 0.0, 1.0), Measured("crosspack", 30.0, 2**30, 0.5, 1e-5))
    result = run("--data", records)
    assert isinstance(result.exception, ContaminationError | SystemExit)
    assert "contaminated" in result.output and "3.00x" in result.output and "1.0 GiB" in result.output
    assert result.exit_code != 0


def test_a_way_that_fails_is_a_line_and_ours_an_error(monkeypatch, records):
    told(monkeypatch, Measured("padded", failure="CUDA out of memory"), Measured("crosspack", 30.0, None, 0.0, 1e-5))
    result = run("--data", records)
    assert result.exit_code == 0 and "CUDA out of memory" in result.output and "failed" in result.output
    told(monkeypatch, Measured("padded", 10.0, None, 0.0, 1.0), Measured("crosspack", failure="no such kernel"))
    assert run("--data", records).exit_code != 0


def test_a_backend_that_is_not_installed_is_named():
    with pytest.raises(PackingError, match=r"--backend nothing: the installed ones are .*torch"):
        command._racer("nothing")
