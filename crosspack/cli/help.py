"""``--help`` of a command: its options in groups, a line or two for each, the everyday ones first.

A command's module may say by ``GROUPS`` what stands together, heading -> (everyday options, further options), each the
names of parameters with blanks between. ``--help`` shows the everyday ones, ``--help-all`` shows all. Without
``GROUPS`` there is one group, which ``--help`` shows whole. What an option is called and does is read from the
annotations of the command's function, which do not depend on the release of typer.
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
        options = {parameter.name: parameter for parameter in options_of(self.function)}
        out = Console(highlight=False)
        arguments = [parameter for parameter in _given(self.function) if _is_argument(parameter)]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *(_argument(each) for each in arguments)])
        out.print(f"Usage: {usage}\n\n{inspect.getdoc(self.function)}", markup=False)
        if arguments:
            out.print(Text("\nArguments", style="bold"))
            out.print(_table(arguments))
        left_out = 0
        for heading, everyday, further in _grouped(self.groups, list(options)):
            names = [*everyday, *further] if whole else everyday
            left_out += len(further) * (not whole)
            if names:
                out.print(Text(f"\n{heading}", style="bold"))
                out.print(_table([options[name] for name in names]))
        if left_out:
            out.print(f"\n{left_out} further options: {ctx.command_path} {ALL}", markup=False)


def options_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a command's function that are options."""
    return [parameter for parameter in _given(function) if not _is_argument(parameter)]


def _given(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that the command line gives."""
    kinds = (int, float, str, bool)
    return [x for x in parameters_of(function) if get_origin(x.annotation) is Annotated or x.annotation in kinds]


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(item, typer.models.ArgumentInfo) for item in get_args(parameter.annotation)[1:])


def _grouped(groups: Groups, names: list[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Heading, everyday options and further ones, of every group; what no group has stands under More, or Options."""
    grouped = {name for parts in groups.values() for part in parts for name in part.split()} | {*_MESSAGES}
    for heading, (everyday, further) in groups.items():
        yield heading, everyday.split(), further.split()
    others = [name for name in names if name not in grouped]
    yield ("More", [], others) if groups else ("Options", others, [])
    yield "Messages", [name for name in _MESSAGES if name in names], []


def _table(parameters: list[inspect.Parameter]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for parameter in parameters:
        table.add_row(*(Text(text) for text in _described(parameter)))
    return table


def _argument(parameter: inspect.Parameter) -> str:
    """The argument as usage lines have it, in brackets if it may be left out."""
    name = parameter.name.upper()
    return name if parameter.default is inspect.Parameter.empty else f"[{name}]"


def _described(parameter: inspect.Parameter) -> tuple[str, str]:
    """The option or argument as it is written, and what it does, its choices and its default."""
    kind, *metadata = (
        get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [parameter.annotation]
    )
    info = next((item for item in metadata if isinstance(item, typer.models.ParameterInfo)), None)
    # typer holds the first name as a default, as if there were no Annotated
    named = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)] if info else []
    names = ", ".join(named or [f"--{parameter.name.replace('_', '-')}"])
    said = [] if info is None or not info.help else [info.help]
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        said.append(f"({', '.join(map(str, _choices(kind)))})")
    value = "" if kind is bool else f" {_VALUES.get(kind, 'NAME')}"
    if _is_argument(parameter):
        names, value = _argument(parameter), ""
    if parameter.default not in (None, False, inspect.Parameter.empty):
        said.append(f"[{parameter.default}]")
    return f"  {names}{value}", " ".join(said)


def _choices(kind: Any) -> list[Any]:
    """The values of a Literal, also of Literals in it."""
    return [value for part in get_args(kind) for value in (_choices(part) if get_origin(part) is Literal else [part])]
