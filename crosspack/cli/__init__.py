"""The console command ``crosspack``: one table of commands, each imported when it is asked for.

A command's module imports typer, rich and packing_core only; frameworks and file formats are imported inside the
command. An error of the project's own ends the command with one line on standard error and exit status 2.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from packing_core.errors import PackingError

# command -> module:function, whose docstring is the help; in the order that --help shows
COMMANDS = {
    "train": "crosspack.cli.train:train",
    "pack": "crosspack.cli.pack:pack",
    "report": "crosspack.cli.report:report",
    "bench": "crosspack.cli.bench:bench",
    "audit": "crosspack.cli.audit:audit",
    "conform": "crosspack.cli.conform:conform",
}


class _Commands(TyperGroup):
    # Any: the class of the context is click's in one release of typer and its own in the next
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        lone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        lone.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(lone)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PackingError as error:
            line = " ".join(str(error).split())
            Console(stderr=True, soft_wrap=True).print(f"[bold red]crosspack:[/] {escape(line)}", highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _crosspack() -> None:
    """Pack variable-length sequences and train on them without cross-contamination."""


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    app(prog_name="crosspack")
