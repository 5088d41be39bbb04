"""``crosspack audit``: what packing does to a model on each path people take, in stock transformers and patched.

The backend measures (the entry point group ``crosspack.audits``); here are the table, the JSON and the exit status.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from math import isnan
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from crosspack.cli.console import OUT, figures
from crosspack.cli.progress import counted
from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.extras import loaded, registered

GROUP = "crosspack.audits"


def audit(
    model: Annotated[str | None, typer.Argument(help="A folder, a config.json or a model type such as qwen3.")] = None,
    all_families: Annotated[bool, typer.Option("--all-families", help="Every decoder family of transformers.")] = False,
    trainer: Annotated[str | None, typer.Option(help="Audit this trainer as well, stock and enabled: trl.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Only this path decides the exit status; repeatable.")] = None,
    backend: Annotated[str, typer.Option(help="Which installed backend measures.")] = "torch",
) -> None:
    """Measure contamination of a model, stock and patched; exit status 1 if a path is contaminated."""
    entry = registered(GROUP, backend)
    if (model is None) != all_families:
        raise PackingError("crosspack audit takes a model, or --all-families")
    module = loaded(entry, extra="hf")
    paths = module.paths(trainer)
    unknown = sorted(set(path or []) - set(paths))
    if unknown:
        raise PackingError(f"--path {unknown[0]}: there is {', '.join(paths)}")
    results: dict[str, list[Any]] = {}
    unbuilt: dict[str, str] = {}
    names = list(module.families()) if all_families else [str(model)]
    for name in counted(OUT, "families", names, len(names)) if all_families else names:
        try:
            results[name] = module.survey(module.config_of(name), trainer)
        except UnsupportedModelError as reason:
            if not all_families:
                raise
            unbuilt[name] = str(reason)
    OUT.print(_families_table(results, paths) if all_families else _model_table(results[names[0]]))
    if unbuilt:
        OUT.print(f"{len(unbuilt)} families have no tiny clone and are not counted")
    OUT.print(_caption(None if all_families else names[0]), style="dim")
    families = {name: [asdict(row) | {"verdict": row.verdict} for row in rows] for name, rows in results.items()}
    figures({"families": families, "not built": unbuilt})
    judged = [r for rows in results.values() for r in rows if not path or r.path in path]
    if any(r.verdict == "contaminated" for r in judged):
        raise typer.Exit(1)


def _caption(name: str | None) -> str:
    clones = f"a tiny random clone of {escape(name)}" if name else "a tiny random clone of each family (counted)"
    return (
        f"Audited: {clones} with every layer kind, on the CPU in float32; no weights are read. The same documents run "
        "packed on each path, and each alone. Figures: the largest error of the logits and of the worst parameter's "
        "gradient, by the largest value of each document alone. Rounding gives 1e-5 or less. A path is contaminated "
        "above 1e-3, and refused if it raises an error."
    )


def _model_table(rows: Iterable[Any]) -> Table:
    table = Table("path", "logits", "gradients", "verdict", header_style="bold")
    for row in rows:
        figures = ("-" if isnan(x) else f"{x:.1e}" for x in (row.logits, row.gradients))
        colour = {"exact": "green", "contaminated": "red"}.get(row.verdict, "yellow")
        table.add_row(
            row.path, *figures, f"[{colour}]{row.verdict}[/]" + (f": {escape(row.raises)}" if row.raises else "")
        )
    return table


def _families_table(results: dict[str, list[Any]], paths: Iterable[str]) -> Table:
    table = Table("path", "exact", "contaminated", "refused", "families", header_style="bold")
    for place, path in enumerate(paths):
        verdicts = [rows[place].verdict for rows in results.values()]
        counts = (str(verdicts.count(verdict)) for verdict in ("exact", "contaminated", "refused"))
        table.add_row(path, *counts, str(len(verdicts)))
    return table
