"""``--help`` of a command: its options in groups, a line or two for each, the everyday ones first.

A command's module may say by ``GROUPS`` what stands together, heading -> (everyday options, further options), each the
names of parameters with blanks between. ``--help`` shows the everyday ones, ``--help-all`` shows all. Without
``GROUPS`` there is one group, which ``--help`` shows whole. The kinds of values are read from the annotations of the
command's function, which do not depend on the release of typer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from crosspack.cli.console import parameters_of

Groups = Mapping[str, tuple[str, str]]

ALL = "--help-all"
_MESSAGES = ("verbose", "quiet", "as_json")  # the options that every command has
_VALUES: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups; ``function`` and ``groups`` are set once it is made."""

    function: Callable[..., Any]
    groups: Groups

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if ALL in args:
            self._print(ctx, whole=True)
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._print(ctx, whole=not self.groups)

    def _print(self, ctx: Any, *, whole: bool) -> None:
        kinds = {parameter.name: parameter.annotation for parameter in parameters_of(self.function)}
        rows = {str(parameter.name): _described(parameter, kinds) for parameter in self.params}
        arguments = [str(parameter.name) for parameter in self.params if _is_argument(parameter)]
        out = Console(highlight=False)
        usage = " ".join([ctx.command_path, "[OPTIONS]", *(rows[name][0].strip() for name in arguments)])
        out.print(f"Usage: {usage}\n\n{inspect.getdoc(self.function)}", markup=False)
        if arguments:
            out.print(Text("\nArguments", style="bold"))
            out.print(_table([rows[name] for name in arguments]))
        left_out = 0
        for heading, everyday, further in _grouped(self.groups, [name for name in rows if name not in arguments]):
            names = [*everyday, *further] if whole else everyday
            left_out += len(further) * (not whole)
            if names:
                out.print(Text(f"\n{heading}", style="bold"))
                out.print(_table([rows[name] for name in names]))
        if left_out:
            out.print(f"\n{left_out} further options: {ctx.command_path} {ALL}", markup=False)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _grouped(groups: Groups, names: list[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Heading, everyday options and further ones, of every group; what no group has stands under More, or Options."""
    grouped = {name for parts in groups.values() for part in parts for name in part.split()} | {*_MESSAGES}
    for heading, (everyday, further) in groups.items():
        yield heading, everyday.split(), further.split()
    others = [name for name in names if name not in grouped]
    yield ("More", [], others) if groups else ("Options", others, [])
    yield "Messages", [name for name in _MESSAGES if name in names], []


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _described(parameter: Any, kinds: Mapping[str, Any]) -> tuple[str, str]:
    """The option or argument as it is written, and what it does, its choices and its default."""
    kind = kinds.get(parameter.name)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    said = [parameter.help] if parameter.help else []
    if get_origin(kind) is Literal:
        said.append(f"({', '.join(map(str, _choices(kind)))})")
    if parameter.default not in (None, False):
        said.append(f"[{parameter.default}]")
    name = str(parameter.name).upper()
    if _is_argument(parameter):
        written = name if parameter.required else f"[{name}]"
    else:
        written = "/".join([", ".join(parameter.opts), *parameter.secondary_opts])
        written += "" if kind in (bool, None) else f" {_VALUES.get(kind, 'NAME')}"
    return f"  {written}", " ".join(said)


def _choices(kind: Any) -> list[Any]:
    """The values of a Literal, also of Literals in it."""
    return [value for part in get_args(kind) for value in (_choices(part) if get_origin(part) is Literal else [part])]
