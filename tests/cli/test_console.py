"""Behaviour of every command: version, completion, output options, errors in one line, exit statuses."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from crosspack.cli import COMMANDS, app, console, progress
from crosspack.cli.progress import TrainProgress, counted
from packing_core.errors import ContaminationError, PackingError
from packing_core.training.records import StepRecord
from tests import processes


def run(*arguments: str):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, list(arguments), prog_name="crosspack")


def module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crosspack", *arguments]
    return processes.run(command, env={**os.environ, **environment})


@pytest.fixture
def command(monkeypatch):
    """Put a function in the place of ``crosspack bench``."""

    def put(function) -> None:
        monkeypatch.setattr("crosspack.cli.bench.bench", function)

    return put


def test_the_version_is_that_of_the_package():
    import crosspack

    result = module("--version")
    assert (result.returncode, result.stdout) == (0, f"crosspack {crosspack.__version__}\n")


def test_the_module_without_arguments_shows_the_commands():
    result = module()
    assert all(command in result.stdout + result.stderr for command in COMMANDS)


@pytest.mark.parametrize(("typed", "offered"), [("crosspack tr", "train"), ("crosspack report --cap", "--capacity")])
def test_the_shell_completes_commands_and_options(typed, offered):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert module(_CROSSPACK_COMPLETE="complete_bash", **words).stdout.split() == [offered]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_characters_that_a_stream_cannot_show_are_escaped(encoding, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "caf\u00e9 \u4e2d\u6587"}), encoding="utf-8")
    result = module("report", "--data", str(data), "--capacity", "16", PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr


def test_a_closed_standard_output_is_no_error():
    closed = f'"{sys.executable}" -m crosspack recipes >&-'
    result = processes.run(["sh", "-c", closed])
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--sample_packing", "--neat-packing"])
def test_a_switch_of_other_packers_is_not_taken_for_an_option_that_means_something_else(option):
    """--packing chooses the lengths of a row."""
    result = run("train", option, "true")
    assert result.exit_code == 2
    assert (
        result.stderr.strip() == f"crosspack: No such option: {option}: leave it out, documents are packed in any case"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nonsense"], "No such option: --nonsense: see `crosspack --help`"),
        (["trian"], "No such command 'trian', is it train?: see `crosspack --help`"),
        (["report", "--capcity", "8"], "--capcity, is it --capacity?: see `crosspack report --help`"),
        (
            ["train", "--max-length", "8"],
            "--max-length, is it --capacity?: see `crosspack train --help`",
        ),
        (["train", "--learning-rate", "8"], "No such option: --learning-rate, is it --lr?"),
        (["report", "--capacity", "many"], "see `crosspack report --help`"),
        (["report", "--capacity", "0"], "see `crosspack report --help`"),
        (["pack"], "Missing option '--output': see `crosspack pack --help`"),
    ],
)
def test_a_mistyped_command_line_is_one_line_that_names_the_help(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("crosspack: ") and says in line


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (PackingError("pass\n two lines"), 2, "crosspack: pass two lines"),
        (ContaminationError("they see each other"), 2, "crosspack: they see each other"),
        (PermissionError(13, "Permission denied", "/far"), 2, "crosspack: /far: Permission denied"),
        (KeyError("gone"), 3, "crosspack: an error of Crosspack's own, KeyError: 'gone': run it again with --verbose"),
    ],
)
def test_every_error_is_one_line_and_verbose_shows_where_it_was_raised(command, error, status, says):
    def bench() -> None:
        raise error

    command(bench)
    result = run("bench")
    assert result.exit_code == status
    (line,) = result.stderr.splitlines()
    assert line.startswith(says)
    assert "in bench" in run("bench", "--verbose").stderr
    assert len(run("bench").stderr.splitlines()) == 1  # the option holds for one run


@pytest.mark.parametrize(
    ("message", "option", "says"),
    [
        (
            '3 has 9 tokens and capacity is 8: pass overflow="split", "truncate" or "drop", or raise capacity',
            "overflow capacity",
            "3 has 9 tokens and --capacity is 8: pass --overflow split, truncate or drop, or raise --capacity",
        ),
        ("Pass implementation='auto' or another of a, b", "implementation", "Pass --attention auto or another of a, b"),
        (
            "equal_cost=True needs more, and rows_per_step=1,000",
            "equal_cost",
            "--equal-cost needs more, and rows_per_step=1,000",
        ),
        (
            "pass a smaller per_device_train_batch_size, or leave dataloader_drop_last=True out",
            "per_device_train_batch_size dataloader_drop_last",
            "pass a smaller --batch-size, or leave --set dataloader_drop_last out",
        ),
        ('no column "overflow", and overflow="drop"', "", 'no column "overflow", and overflow="drop"'),
    ],
)
def test_errors_name_options_in_place_of_the_keywords_that_they_carry(command, message, option, says):
    def bench() -> None:
        raise pickle.loads(pickle.dumps(PackingError(message, option=option)))  # as one of a worker process

    command(bench)
    assert run("bench").stderr == f"crosspack: {says}\n"


def printing_bench() -> None:
    print("a library's line")
    console.OUT.print("a table")
    console.warn("look out")
    logging.getLogger("packing_core.plan").info("a choice")
    console.figures({"rate": 1.5})


def test_json_leaves_standard_output_to_the_figures(command):
    command(printing_bench)
    result = run("bench", "--json")
    assert json.loads(result.stdout) == {"rate": 1.5}
    assert "a table" in result.stderr and "a library's line" in result.stderr


def test_figures_are_printed_for_json_alone(command):
    command(printing_bench)
    assert run("bench").stdout == "a library's line\na table\n"
    assert run("bench").stderr == "crosspack: warning: look out\n"


def test_quiet_prints_neither_tables_nor_warnings(command):
    command(printing_bench)
    result = run("bench", "--quiet")
    assert "a table" not in result.output and "look out" not in result.output
    assert json.loads(run("bench", "--quiet", "--json").stdout) == {"rate": 1.5}


def test_verbose_prints_the_log(command):
    command(printing_bench)
    assert "a choice" in run("bench", "--verbose").stderr
    assert "a choice" not in run("bench").output


def test_exit_statuses_of_a_command_pass(command):
    def bench() -> None:
        raise typer.Exit(1)

    command(bench)
    assert run("bench").exit_code == 1


@pytest.fixture
def piped(monkeypatch):
    """A console that is no terminal, and the seconds that its clock shows."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return Console(force_terminal=False, width=80), clock


def test_a_piped_training_run_prints_a_line_now_and_then(piped, capsys):
    out, clock = piped
    with TrainProgress(out, 100) as bars:
        for step in range(100):
            clock[0] += 1.0
            bars.step(StepRecord("packed", step, 2.0, 50, 64, 1.0))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[2]) for line in lines] == [*range(1, 100, 10), 100]
    assert lines[0] == "packed: step 1 of 100, 50 tokens/s, loss 2.0000"


def test_piped_counts_print_a_line_now_and_then(piped, capsys):
    out, clock = piped

    def items():
        for number in range(25):
            clock[0] += 1.0
            yield number

    assert list(counted(out, "documents read", items())) == list(range(25))
    assert capsys.readouterr().out.splitlines() == ["documents read: 9", "documents read: 19"]
    for _ in counted(out, "auditing", range(15), 15):
        clock[0] += 1.0
    assert capsys.readouterr().out.splitlines() == ["auditing: 10 of 15"]


def test_names_that_act_on_a_terminal_and_passwords_are_not_printed(tmp_path, capsys):
    folder = tmp_path / "a\x1b[31m\x9b2J"
    folder.mkdir()
    (folder / "data.jsonl").write_text('{"y": 1}\n')
    result = CliRunner().invoke(app, ["report", "--data", str(folder / "data.jsonl")])
    assert result.exit_code == 2 and "\x1b" not in result.output and "\x9b" not in result.output
    assert r"a\x1b[31m\x9b2J" in result.output
    result = CliRunner().invoke(app, ["report", "--data", "ftp://me:secret@localhost:9/x.jsonl"])
    assert result.exit_code == 2 and "secret" not in result.output
    assert "ftp://me:***@localhost:9/x.jsonl" in result.output
    console._Shown().print("[bold]one\x07two[/]\nthree")
    assert capsys.readouterr().out == "one\\x07two\nthree\n"
