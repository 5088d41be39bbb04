"""``crosspack train`` on several ranks: by torchrun, by ``--nproc``, and how failures end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from crosspack.cli import launch
from tests.cli.console import done, losses, one_line, run
from tests.torch_backend.ranks import torchrun


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does_and_one_process_goes_on(small, tmp_path):
    """Three rows a step on two ranks, and their checkpoint resumed by one process for two more steps."""
    options = [*small, "--rows-per-step", 3, "--decay", "constant", "--warmup", 0, "--save-every", 2]
    one, two = tmp_path / "one", tmp_path / "two"
    done(*options, "--steps", 6, "--output", one)
    shared = map(str, [*options, "--steps", 4, "--output", two, "--strategy", "fsdp"])
    printed = torchrun("-m", "packing_core.cli", *shared)
    assert printed.count("audit: exact") == 1  # by rank 0 alone
    assert json.loads((two / "crosspack.json").read_text())["device"].endswith("2 processes (fsdp)")
    np.testing.assert_allclose(losses(two), losses(one)[:4], rtol=1e-6)
    done(*options, "--steps", 6, "--output", two, "--resume")
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-6)
    assert not list(two.glob(".crosspack-partial-*")) and not (two / ".crosspack-lock").exists()


@pytest.mark.parametrize("option", ["--data", "--eval-data"])
def test_a_pipe_is_no_data_of_several_processes(small, tmp_path, option, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # without one, whoever opens it waits for ever
    says = f"{option} {tmp_path}/pipe is a pipe, which only one process can read: write what it brings to a file"
    assert says in one_line(run(*small, option, tmp_path / "pipe", "--nproc", 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert says in one_line(run(*small, option, tmp_path / "pipe"))
    os.close(writer)


def test_processes_of_nproc_run_the_same_options(small, monkeypatch):
    started = []

    def start(processes, arguments):
        started.append((processes, arguments, Path(arguments[2]).read_text()))
        return 0

    monkeypatch.setattr(launch, "start", start)
    done(*small, "--nproc", 2, "--steps", 3, "--dtype", "bfloat16", "--quiet", "--json")
    ((processes, arguments, file),) = started
    assert processes == 2
    assert arguments[:2] == ["train", "--config"] and arguments[3:] == ["--quiet", "--json"]
    assert {"steps: 3", 'dtype: "bfloat16"', "nproc: 2", f'data: ["{small[4]}"]'} <= set(file.splitlines())


def test_the_status_of_the_process_that_fails_is_that_of_all(tmp_path, capfd):
    assert launch.start(2, ["report", "--data", str(tmp_path / "absent.jsonl")]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines and all("absent.jsonl: no such file or folder" in line for line in lines)


def test_every_process_knows_its_rank_and_one_that_fails_ends_the_others(tmp_path, monkeypatch):
    """A stand-in for the interpreter: rank 1 fails, and rank 0 would sleep for an hour."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\necho "$RANK of $WORLD_SIZE, $LOCAL_RANK, $@" >> {tmp_path}/seen\n'
        '[ "$RANK" = 1 ] && sleep 0.3 && exit 7\nexec sleep 3600\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert launch.start(2, ["train"]) == 7
    assert sorted((tmp_path / "seen").read_text().splitlines()) == [
        "0 of 2, 0, -m crosspack train",
        "1 of 2, 1, -m crosspack train",
    ]


def test_options_that_several_ranks_exclude_are_refused_under_torchrun_too(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--compare measures one process" in one_line(run(*small, "--compare"))
    assert "--rows-per-step 1 leaves some of 2 processes" in one_line(run(*small, "--rows-per-step", 1))
    assert "--backend jax has no --nproc or torchrun" in one_line(run(*small, "--backend", "jax"))
