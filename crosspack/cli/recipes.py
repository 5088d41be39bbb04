"""``crosspack recipes``: files of options for ``crosspack train`` to begin with, one for each kind of run."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from crosspack.cli.console import OUT, figures
from packing_core.errors import PackingError


def recipes(
    name: Annotated[str | None, typer.Argument(help="Which one is written; without it, all are listed.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write; without it, the recipe is printed.")] = None,
) -> None:
    """Write a file of options for `crosspack train --config`, or list them."""
    recipe_texts = texts()
    if name is None:
        if output is not None:
            raise PackingError(f"--output {output}: say which recipe: {', '.join(recipe_texts)}")
        width = max(map(len, recipe_texts))
        for each, text in recipe_texts.items():
            OUT.print(f"{each:{width}}  {about(text)}", markup=False, soft_wrap=True)
        figures({each: about(text) for each, text in recipe_texts.items()})
        return
    if name not in recipe_texts:
        raise PackingError(f"no recipe {name}: there are {', '.join(recipe_texts)}")
    if output is None:
        OUT.print(recipe_texts[name], markup=False, soft_wrap=True, end="")
        return
    if output.exists():
        raise PackingError(f"--output {output} exists: name another file")
    output.write_text(recipe_texts[name], encoding="utf-8")
    OUT.print(f"crosspack train --config {output}", markup=False)


def about(text: str) -> str:
    """The first line of a recipe, which says what it is for."""
    return text.partition("\n")[0].removeprefix("# ")


def texts() -> dict[str, str]:
    """Returns the text of each recipe by its name."""
    there = sorted(files("crosspack.recipes").iterdir(), key=lambda file: file.name)
    return {x.name.removesuffix(".yaml"): x.read_text(encoding="utf-8") for x in there if x.name.endswith(".yaml")}
