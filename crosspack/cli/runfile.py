"""``--config run.yaml``: options of a command in a file, and the file that a run leaves so that it can be repeated.

The file is a mapping from the names of options, without their dashes, to values. What it says takes the place of the
defaults, so an option on the command line wins over the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from crosspack.cli.settings import meant
from crosspack.reading.yaml_text import MAX_TEXT, load_yaml
from packing_core.errors import PackingError, first_line

RUN_FILE = "run.yaml"
_COMPLETION = ("install_completion", "show_completion")  # which typer adds to a command
# What belongs to one call of the command and not to the run.
_OF_A_CALL = ("config", "resume", "overwrite", "verbose", "quiet", "as_json")


def take_file(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``, which must be eager: the file's values become the command's defaults.

    Raises:
        PackingError: the file is not a mapping, names no option of the command, or has a value that is not plain.
    """
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = load_yaml(file.read(MAX_TEXT + 1))
    except (OSError, UnicodeError, PackingError) as error:
        raise PackingError(f"--config {path}: {first_line(error)}") from error
    if not isinstance(content, Mapping):
        raise PackingError(f"--config {path}: it must hold a line `option: value` for each option")
    names = _names(context)
    known = {option: name for name, option in names.items()}
    several = {str(parameter.name) for parameter in context.command.params if getattr(parameter, "multiple", False)}
    given = {str(key).replace("_", "-"): value for key, value in content.items()}
    for key, value in given.items():
        if key not in known:
            near = meant(key, known)
            hint = "see its --help" if near is None else f"is it {near}?"
            raise PackingError(f"--config {path}: the command has no option --{key}: {hint}")
        parts = value if isinstance(value, list) and known[key] in several else [value]
        if not all(isinstance(part, bool | int | float | str | None) for part in parts):
            raise PackingError(f"--config {path}: {key} is a {type(value).__name__}: an option takes one value")
    # as text, which the command converts and checks as it does on the command line
    context.default_map = {
        known[key]: _texts(value) if known[key] in several else str(value)
        for key, value in given.items()
        if value is not None
    }
    return path


def _texts(value: Any) -> list[str]:
    """Returns the texts of an option that may be given several times."""
    return [str(part) for part in (value if isinstance(value, list) else [value])]


def effective(context: typer.Context, **settled: Any) -> dict[str, Any]:
    """Every option of a run by its name without dashes, with the value that it had.

    Args:
        settled: values that replace a default which says nothing by itself.
    """
    values = {**context.params, **settled}
    names = _names(context)
    return {
        option: str(values[name]) if isinstance(values[name], Path) else values[name]
        for name, option in names.items()
        if name in values
    }


def as_yaml(options: Mapping[str, Any]) -> str:
    """The options as a file that ``--config`` takes."""
    return "".join(f"{option}: {_ascii(json.dumps(value, ensure_ascii=False))}\n" for option, value in options.items())


def _ascii(text: str) -> str:
    """Escapes characters as YAML does, which reads the two escapes that JSON writes of an emoji as two characters."""

    def escaped(character: re.Match[str]) -> str:
        number = ord(character[0])
        return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"

    return re.sub(r"[^\x20-\x7e]", escaped, text)


def _names(context: typer.Context) -> dict[str, str]:
    """Parameter name -> name of the option without dashes, of what a file may hold."""
    named = {str(parameter.name): parameter.opts[0].removeprefix("--") for parameter in context.command.params}
    return {name: option for name, option in named.items() if name not in (*_OF_A_CALL, *_COMPLETION)}
