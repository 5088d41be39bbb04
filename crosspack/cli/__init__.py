"""The console command ``crosspack``: one table of commands, each imported when it is asked for.

A command's module imports typer, rich and packing_core only; frameworks and file formats are imported inside the
command. An error ends the command with one line on standard error and an exit status of :class:`Status`.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
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
from crosspack.cli.settings import meant
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
# keywords whose options have other names
_NAMES = {
    "dataloader_drop_last": "--set dataloader_drop_last",
    "implementation": "--attention",
    "keys": "--order-by",
    "memory": "--gradient-checkpointing",
    "per_device_train_batch_size": "--batch-size",
    "strategy": "--packing",
}
_WITHOUT_VALUE = ("memory",)


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
        return error.with_names(_console_option), Status.ERROR
    if isinstance(error, _UsageError):
        command: Any = getattr(error, "ctx", None)
        option = getattr(error, "option_name", "")
        if option.lstrip("-").replace("-", "_") in SWITCHES:
            return f"No such option: {option}: {NO_SWITCH}", Status.ERROR
        help = f"{command.command_path if command else 'crosspack'} --help"
        message = error.format_message().rstrip(".")
        if option and command and type(error).__name__ == "NoSuchOption":
            options = [name.removeprefix("--") for parameter in command.command.params for name in parameter.opts]
            right = meant(option.lstrip("-"), options)
            message = f"No such option: {option}" + ("" if right is None else f", is it --{right}?")
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


def _console_option(keyword: str, value: str) -> str:
    option = _NAMES.get(keyword) or f"--{keyword.replace('_', '-')}"
    return option if keyword in _WITHOUT_VALUE else f"{option} {value}".rstrip()


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
    if sys.stdout is None:  # closed by whoever started this process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of a terminal or file that cannot show a character
    try:
        app(prog_name="crosspack")
    except KeyboardInterrupt:  # while a command's module is imported
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EBADF):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output is closed, and Python flushes it at its end
        raise SystemExit(Status.ERROR) from None
