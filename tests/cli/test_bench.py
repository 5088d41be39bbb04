"""``crosspack bench``: each way has a rate and a verdict, and a verdict against packing ends the command."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
from transformers import CONFIG_MAPPING

from crosspack.cli import bench as command
from packing_core.errors import ContaminationError
from packing_core.training import job, timing
from tests.cli import console
from torch_backend.auditing.tiny import tiny_config
from torch_backend.job import bench as torch_bench

Measured = partial(job.Measured, judged=1)
WAYS = ["padded", "stock packed", "stock packed, use_cache=False", "crosspack"]


run = partial(console.run, "bench", "--seconds", 0, "--capacity", 96)


@pytest.fixture
def records(write):
    draw = random.Random(0)
    texts = ("".join(draw.choices("abcdefgh ", k=length)) for length in (9, 60, 33, 50, 18, 40, 27, 70))
    return str(write("data.jsonl", [{"text": text} for text in texts]))


@pytest.mark.parametrize(
    ("family", "verdicts"),
    [
        ("llama", ["exact", "contaminated", "exact", "exact"]),  # the default cache hides the restarting positions
        ("gpt_oss", ["exact", "contaminated", "contaminated", "exact"]),  # never hands position_ids to its mask
    ],
)
def test_every_way_has_a_rate_and_a_verdict(tmp_path, records, family, verdicts):
    config = tiny_config(CONFIG_MAPPING[family](), head_dim=16, changes={"vocab_size": 512})
    config.save_pretrained(tmp_path)
    result = run("--model", str(tmp_path / "config.json"), "--data", records, "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert [each["way"] for each in measured] == WAYS
    assert [each["verdict"] for each in measured] == verdicts
    assert all(each["tokens_per_second"] > 0 and each["failure"] == "" for each in measured)
    assert "1.00x" in result.stderr


@pytest.mark.slow
def test_rows_of_one_document_judge_nothing(tmp_path, write):
    """The first row alone was judged: of one document, in which nobody can see another."""
    config = tiny_config(CONFIG_MAPPING["gpt_oss"](), head_dim=16, changes={"vocab_size": 512})
    config.save_pretrained(tmp_path)
    draw = random.Random(0)
    words = ["ab", "cd", "ef", "gh"]
    longs = [{"text": " ".join(draw.choices(words, k=120))} for _ in range(6)]
    options = ("--model", str(tmp_path / "config.json"), "--json", "--overflow", "truncate")
    alone = run(*options, "--data", str(write("long.jsonl", longs)))
    assert alone.exit_code == 0 and "no row holds two documents" in alone.stderr, alone.output
    assert [each["verdict"] for each in json.loads(alone.stdout)] == ["not judged"] * 4
    mixed = [*longs, {"text": "ab"}, {"text": "cd"}]
    for seed in range(2):
        result = run(*options, "--data", str(write("mixed.jsonl", mixed)), "--seed", str(seed))
        verdicts = [each["verdict"] for each in json.loads(result.stdout)]
        assert verdicts == ["exact", "contaminated", "contaminated", "exact"], (seed, result.output)


@pytest.mark.slow
def test_what_one_step_waits_for_does_not_count(monkeypatch, records):
    """The rate is the median step's: here of 10 s, 1 s, 1 s, 600 s, 1 s the first warms up and the fourth compiles."""
    clock, durations = [0.0], iter([10.0] * 4 + [1.0] * 8 + [600.0] * 4 + [1.0] * 4)  # they take steps in turn
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch_bench, "_wait", lambda device: clock.__setitem__(0, clock[0] + next(durations)))
    result = run("--data", records, "--seconds", "602.5", "--json")
    assert result.exit_code == 0, result.output
    assert all(30 <= each["tokens_per_second"] <= 96 for each in json.loads(result.stdout))  # a row in 1 s
    assert "so the machine is busy and speeds are unreliable" in result.stderr  # nothing ran in those seconds


def told(monkeypatch, *measured: job.Measured) -> None:
    monkeypatch.setattr(command, "loaded", lambda entry, extra: lambda job, seconds: iter(measured))


def test_packed_documents_that_see_each_other_end_the_command(monkeypatch, records):
    told(
        monkeypatch,
        Measured("padded", 10.0, None, 0.0, 1.0),
        Measured("crosspack", 30.0, 2**30, 0.5, 1e-5),
    )
    result = run("--data", records)
    assert isinstance(result.exception, ContaminationError | SystemExit)
    assert "contaminated" in result.output and "3.00x" in result.output and "1.0 GiB" in result.output
    assert result.exit_code != 0


def test_a_way_that_fails_is_a_line_and_ours_an_error(monkeypatch, records):
    told(
        monkeypatch,
        Measured("padded", failure="CUDA out of memory"),
        Measured("crosspack", 30.0, None, 0.0, 1e-5),
    )
    result = run("--data", records)
    assert result.exit_code == 0 and "CUDA out of memory" in result.output and "failed" in result.output
    told(monkeypatch, Measured("padded", 10.0, None, 0.0, 1.0), Measured("crosspack", failure="no such kernel"))
    assert run("--data", records).exit_code != 0


def test_the_processor_time_that_steps_got_decides_the_warning(monkeypatch, records):
    for cpu, warned in ((0.4, True), (0.95, False), (None, False)):
        told(
            monkeypatch,
            Measured("padded", 10.0, None, 0.0, 1.0),
            Measured("crosspack", 30.0, None, 0.0, 1.0, cpu=cpu),
        )
        assert ("40% of the processor time" in run("--data", records).stderr) == warned


def test_a_backend_that_is_not_installed_is_named():
    result = run("--backend", "nothing")
    assert result.exit_code == 2 and "--backend nothing: the installed ones are torch" in result.stderr
