"""``--help`` in groups: short, complete with ``--help-all``, and true to the command's own parameters."""

from __future__ import annotations

from importlib import import_module

import pytest
import typer

from crosspack.cli import COMMANDS, app
from crosspack.cli.help import _MESSAGES
from tests.cli.console import done


def shown(*arguments: str, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    result = done(*arguments)
    return result.output


def test_the_help_of_train_fits_a_page_and_names_the_rest(monkeypatch):
    everyday = shown("train", "--help", width=80, monkeypatch=monkeypatch)
    assert len(everyday.splitlines()) <= 60
    assert "train --help-all" in everyday.rstrip().splitlines()[-1] and "further options" in everyday
    assert "--lora-targets" not in everyday
    assert "--lora-targets" in shown("train", "--help-all", width=80, monkeypatch=monkeypatch)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "conform"])
def test_the_whole_help_has_every_option_of_the_command(command, monkeypatch):
    found = typer.main.get_command(app).get_command(None, command)
    whole = shown(command, "--help-all", width=140, monkeypatch=monkeypatch)
    for parameter in found.params:
        if not getattr(parameter, "param_type_name", "").startswith("argument"):
            assert parameter.opts[0] in whole


@pytest.mark.parametrize(("command", "usage"), [("inspect", "DATA"), ("recipes", "[NAME]"), ("audit", "[MODEL]")])
def test_an_argument_stands_in_the_usage_and_is_no_option(command, usage, monkeypatch):
    shown_help = shown(command, "--help", width=80, monkeypatch=monkeypatch)
    assert shown_help.splitlines()[0].endswith(f"{command} [OPTIONS] {usage}")
    assert f"\n  {usage}  " in shown_help
    assert f"--{usage.strip('[]').lower()} TEXT" not in shown_help


def test_the_groups_of_train_name_each_of_its_options_once():
    module = import_module("crosspack.cli.train")
    grouped = [name for parts in module.GROUPS.values() for part in parts for name in part.split()]
    assert len(grouped) == len(set(grouped))
    command = typer.main.get_command(app).get_command(None, "train")
    assert {*grouped, *_MESSAGES} == {parameter.name for parameter in command.params}
