"""Optional libraries: what is needed at least, and the one line a user reads when it is absent or too old."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from packing_core.errors import MissingExtraError

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
    if minimum is not None:
        try:
            present = version(distribution)
        except PackageNotFoundError:  # a source tree on the path has no metadata: nothing to compare
            return found
        if _release(present) < _release(minimum):
            raise MissingExtraError(
                f"{distribution} {present} is too old, Crosspack needs {minimum} or newer: "
                f"pip install --upgrade {distribution}"
            )
    return found


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)
