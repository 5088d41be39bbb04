"""Optional libraries and installed backends: what is needed at least, and the line a user reads when it is missing."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import ModuleType
from typing import Any

from packing_core.errors import MissingExtraError, PackingError

# Minimum versions are checked here, when a function needs them, and not in pyproject.toml, because an extra must never
# move a torch, jax or transformers that is already installed.
MINIMUM = {"torch": "2.11", "transformers": "5.0", "jax": "0.10"}


def require(module: str, *, extra: str, distribution: str | None = None) -> ModuleType:
    """Import ``module`` and return it, or say in one line which extra brings it.

    Raises:
        MissingExtraError: the module is not installed, or is older than ``MINIMUM`` says.
    """
    distribution = distribution or module.partition(".")[0]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the library is there and something that *it* needs is not: its own message is the better one
        raise MissingExtraError(f"{distribution} is not installed: pip install 'crosspack[{extra}]'") from None
    minimum = MINIMUM.get(distribution)
    if minimum is not None and (present := installed(distribution)) is not None and is_older(present, minimum):
        raise MissingExtraError(
            f"{distribution} {present} is too old, Crosspack needs {minimum} or newer: "
            f"pip install --upgrade {distribution}"
        )
    return found


def installed(distribution: str) -> str | None:
    """The version of what is installed; None without metadata, as of a source tree on the path."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def registered(group: str, name: str) -> EntryPoint:
    """Loads what an installed package registers as ``name`` in a group of entry points; nothing is imported.

    Raises:
        PackingError: no installed package registers that name.
    """
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        raise PackingError(f"--backend {name}: the installed ones are {', '.join(sorted(found)) or 'none'}")
    return found[name]


def loaded(entry: EntryPoint, *, extra: str) -> Any:
    """The object behind an entry point.

    Raises:
        MissingExtraError: its framework is not installed, or too old.
    """
    try:
        return entry.load()
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'crosspack[{extra}]'") from None


def is_older(present: str, minimum: str) -> bool:
    """Returns whether a version is older than the least that is needed."""
    return _release(present) < _release(minimum)


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` and ``2.13.0rc1`` both give (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
