"""Commands of the console in this process, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from crosspack.cli import app


def run(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object):
    """The result of a command that has to succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def words(result) -> str:
    return " ".join(result.output.split())


def losses(folder: Path, run: str = "packed") -> list[float]:
    return [record["loss"] for record in json.loads((folder / "crosspack.json").read_text())["runs"][run]]


def one_line(result) -> str:
    """The error, after checking that it is one line on standard error, exit status 2, without a traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("crosspack: ")
    return line
