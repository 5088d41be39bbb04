"""The console command ``crosspack``: one table of commands, each imported when it is asked for.

A command's module imports typer, rich and packing_core only; frameworks and file formats are imported inside the
command. An error ends the command with one line on standard error and an exit status of :class:`Status`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from crosspack.cli.console import fail, with_output_options
from crosspack.cli.help import GroupedCommand
from packing_core.errors import PackingError, first_line
from packing_core.hints import NO_SWITCH, SWITCHES

# command -> module:function, whose docstring is the help; in the order that --help shows
COMMANDS = {
    "train": "crosspack.cli.train:train",
    "pack": "crosspack.cli.pack:pack",
    "report": "crosspack.cli.report:report",
    "inspect": "crosspack.cli.inspect:inspect",
    "bench": "crosspack.cli.bench:bench",
    "audit": "crosspack.cli.audit:audit",
    "doctor": "crosspack.cli.doctor:doctor",
    "recipes": "crosspack.cli.recipes:recipes",
    "conform": "crosspack.cli.conform:conform",
}
_BY_PYTEST = ("conform",)  # commands whose output is pytest's

logger = logging.getLogger(__name__)

_UsageError: Any = typer.BadParameter.__base__  # click's in one release of typer, and its own in the next
# Errors name a function's keywords; these are the console's names for them.
_KEYWORDS = {
    r'\boverflow="(\w+)"': r"--overflow \1",
    r'\bimplementation="(\w+)"': r"--attention \1",
    r"\bcontext=([\d,]+)": r"--context \1",
    r"\bmin_piece=([\d,]+)": r"--min-piece \1",
    r"^context must be\b": "--context must be",
    r"\bmin_piece is\b": "--min-piece is",
    r"\bleave context out\b": "leave --context out",
    r"\bleave min_piece out\b": "leave --min-piece out",
    r"\blower min_piece or context\b": "lower --min-piece or --context",
    r"\bequal_cost=True\b": "--equal-cost",
    r"\brows_per_step=([\d,]+)": r"--rows-per-step \1",
    r"\bleave equal_cost out\b": "leave --equal-cost out",
    r"^compile=True\b": "--compile",
    r"\bleave split out\b": "leave --split out",
    r"\bpass another split\b": "pass another --split",
    r"\bas split$": "as --split",
    r'\bpass compile="auto"': "leave --compile out",
}
_BESIDE_KEYWORDS = {r'(?<=\s)"(\w+)"': r"\1", r"\braise capacity\b": "raise --capacity"}


class Status(IntEnum):
    """Exit statuses besides 0; a suite that finds a failure ends ``crosspack conform`` with 1 too."""

    CONTAMINATED = 1
    ERROR = 2
    BUG = 3


class _Commands(TyperGroup):
    # Any: the class of the context is click's in one release of typer and its own in the next
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = import_module(module)
        function = getattr(found, name)
        lone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        if cmd_name in _BY_PYTEST:
            lone.command(cmd_name)(function)
            return typer.main.get_command(lone)
        function = with_output_options(function)
        lone.command(cmd_name, cls=GroupedCommand)(function)
        command: Any = typer.main.get_command(lone)
        command.function, command.groups = function, getattr(found, "GROUPS", {})
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args:  # shows the help
            return super().parse_args(ctx, args)
        with _errors_in_one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _errors_in_one_line():
            return super().invoke(ctx)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Print an error as one line, and with ``--verbose`` its traceback, and exit."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        line, status = _described(error)
        fail(line)
        logger.info("where it was raised:", exc_info=True)
        raise typer.Exit(status) from error


def _described(error: Exception) -> tuple[str, Status]:
    """Returns the message of an error as users read it, and the exit status."""
    if isinstance(error, PackingError):
        return with_console_names(str(error)), Status.ERROR
    if isinstance(error, _UsageError):
        command: Any = getattr(error, "ctx", None)
        option = getattr(error, "option_name", "")
        if option.lstrip("-").replace("-", "_") in SWITCHES:
            return f"No such option: {option}: {NO_SWITCH}", Status.ERROR
        help = f"{command.command_path if command else 'crosspack'} --help"
        message = error.format_message().rstrip(".")
        if (typed := re.fullmatch(r"No such command '(\S+)'", message)) and (
            near := get_close_matches(typed[1], COMMANDS, n=1)
        ):
            message += f", is it {near[0]}?"
        return f"{message}: see `{help}`", Status.ERROR
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or first_line(error)}", Status.ERROR
    return (
        f"an error of Crosspack's own, {type(error).__name__}: {first_line(error)}: run it again with --verbose and "
        "report what it prints",
        Status.BUG,
    )


def with_console_names(message: str) -> str:
    """The message of a library function with the options of the console in place of the function's keywords.

    >>> with_console_names('pass overflow="split", "truncate" or "drop", or raise capacity')
    'pass --overflow split, truncate or drop, or raise --capacity'
    """
    named = _replaced(message, _KEYWORDS)
    return message if named == message else _replaced(named, _BESIDE_KEYWORDS)


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for pattern, replacement in replacements.items():
        text = re.sub(pattern, replacement, text)
    return text


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(chosen: bool) -> None:
    if chosen:
        import crosspack

        typer.echo(f"crosspack {crosspack.__version__}")
        raise typer.Exit


@app.callback()
def _crosspack(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Pack variable-length sequences and train on them without cross-contamination."""


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    app(prog_name="crosspack")
