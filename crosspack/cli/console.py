"""Printing of all commands: tables and progress on standard output, errors on standard error, figures as JSON.

Every command has the options that are added here. ``--json`` leaves standard output to the figures, which a command
passes to :func:`figures`; everything else goes to standard error then, whoever prints it. Rich leaves out colours where
the output is not a terminal.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from functools import wraps
from math import isfinite
from typing import Annotated, Any, TextIO, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from crosspack.reading.files import masked

# What would act on a terminal, but for new lines and tabs.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str) -> str:
    """The text as it is printed: names of files may hold control characters, and URLs a password."""
    return masked(_CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text))


class _Shown(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, highlight=False, **options)  # a file a:100:b would be a picture

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)


OUT = _Shown()
_LOGGED = ("packing_core", "torch_backend", "jax_backend", "crosspack")
_NOISY = ("torchao", "torch.utils._pytree")  # where torchao has no kernels; peft imports it wherever it is installed
# Variables that turn off the bars of transformers and huggingface_hub, and of datasets; read when these are imported.
_OTHERS_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_OPTIONS: dict[str, Any] = {
    "verbose": Annotated[
        bool, typer.Option("--verbose", "-v", help="Log which implementations run and why; show errors in full.")
    ],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")],
    "as_json": Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and everything else on standard error.")
    ],
}
_figures: TextIO | None = None


def with_output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``command`` with ``--verbose``, ``--quiet`` and ``--json``, and an option for each field of its dataclasses."""
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(command)
    def run(*, verbose: bool, quiet: bool, as_json: bool, **options: Any) -> Any:
        global _figures
        _figures = sys.stdout if as_json else None
        _log(verbose)
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            os.environ.update(dict.fromkeys(_OTHERS_BARS, "1"))
        for name, kind in groups.items():
            options[name] = kind(**{field.name: options.pop(field.name) for field in fields(kind)})
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            vars(OUT).update(vars(_Shown(quiet=quiet)))  # every module holds this console by its name
            return command(**options)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    parameters = [*parameters_of(command), *added]
    vars(run)["__signature__"] = inspect.signature(command).replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parameters_of(command: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a command, each that takes a dataclass replaced by the fields of it."""
    found: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(group := parameter.annotation):
            hints = get_type_hints(group, include_extras=True)
            found += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
                )
                for field in fields(group)
            ]
        else:
            found.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return found


def figures(data: Any) -> None:
    """Print a command's figures, as plain data, if ``--json`` was given; what is no finite number is null."""
    if _figures is not None:
        _figures.write(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def warn(line: str) -> None:
    """Print a warning in one line on standard error, unless ``--quiet`` was given."""
    if not OUT.quiet:
        _to_stderr("[bold yellow]crosspack: warning:[/]", line)


def fail(line: str) -> None:
    """Print an error in one line on standard error."""
    _to_stderr("[bold red]crosspack:[/]", line)


def _to_stderr(prefix: str, line: str) -> None:
    _Shown(stderr=True, soft_wrap=True).print(f"{prefix} {escape(' '.join(line.split()))}")


def _log(verbose: bool) -> None:
    """Send the project's own log to standard error, or nowhere; torchao's complaints at import only with the former."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.NOTSET if verbose else logging.ERROR)
    for name in _LOGGED:
        logger = logging.getLogger(name)
        logger.handlers = [logging.StreamHandler()] if verbose else []
        logger.setLevel(logging.INFO if verbose else logging.NOTSET)
