"""``crosspack doctor``: installed and missing packages, and the implementations each backend would run and why.

Versions come from the packages' metadata, so nothing is imported for them. Each backend that is installed examines
itself (the entry point group ``crosspack.doctors``); one that cannot be imported is a line that says what to install.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires
from typing import Any

from rich.markup import escape
from rich.table import Table

import crosspack
from crosspack.cli.console import OUT, figures
from packing_core.diagnosis import GROUP, Diagnosis
from packing_core.errors import PackingError, first_line
from packing_core.extras import MINIMUM, installed, is_older, loaded

EXTRAS = ("", "torch", "hf", "jax", "plot", "flash", "xformers")  # what users install; "" is always there
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[[^]]*])?\s*([^;]*?)\s*(?:;.*extra == ["']([\w-]+)["'].*)?""")


def doctor() -> None:
    """Show versions, devices, the implementation that each kind of layer would take here, and what is missing."""
    packages = list(_packages())
    OUT.print(f"crosspack {crosspack.__version__}, Python {platform.python_version()}, {platform.platform()}")
    OUT.print(_versions_table(packages))
    backends: dict[str, Any] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name, reverse=True):
        with OUT.status(f"examining {entry.name}"):
            found = _examine(entry)
        backends[entry.name] = asdict(found) if isinstance(found, Diagnosis) else {"unusable": found}
        _print(entry.name, found)
    if not backends:
        OUT.print("no backend is registered: reinstall crosspack")
    figures(
        {
            "crosspack": crosspack.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": [asdict(package) | {"state": package.state} for package in packages],
            "backends": backends,
        }
    )


@dataclass(frozen=True)
class Package:
    """A library that Crosspack can use: its name, the version here (None: absent), what is needed, which extra."""

    name: str
    installed: str | None
    needed: str
    extra: str

    @property
    def state(self) -> str:
        """``ok``, ``too old`` or ``missing``."""
        if self.installed is None:
            return "missing"
        least = self.needed.removeprefix(">=")
        return "too old" if least and is_older(self.installed, least) else "ok"


def _packages() -> Iterator[Package]:
    try:
        stated = requires("crosspack") or []
    except PackageNotFoundError:  # a source tree on the path
        stated = list(MINIMUM)
    seen = set()
    for requirement in stated:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or (match[3] or "") not in EXTRAS or match[1] in seen:
            continue
        seen.add(match[1])
        needed = f">={MINIMUM[match[1]]}" if match[1] in MINIMUM else match[2]
        yield Package(match[1], installed(match[1]), needed, match[3] or "")


def _examine(entry: Any) -> Diagnosis | str:
    """Returns a backend's diagnosis, or why the backend cannot be used here."""
    try:
        found: Diagnosis = loaded(entry, extra=entry.name)()
    except PackingError as error:
        return str(error)
    except Exception as error:  # a broken installation is what this command is for
        return f"{type(error).__name__}: {first_line(error)}"
    return found


def _versions_table(packages: list[Package]) -> Table:
    table = Table("package", "installed", "needed", "comes with", header_style="bold")
    for package in packages:
        colour = {"ok": "green", "too old": "red"}.get(package.state, "yellow")
        shown = package.installed if package.state == "ok" else f"{package.installed or ''} {package.state}".strip()
        extra = f"crosspack[{package.extra}]" if package.extra else "crosspack"
        table.add_row(package.name, f"[{colour}]{shown}[/]", package.needed or "any", escape(extra))
    return table


def _print(name: str, found: Diagnosis | str) -> None:
    if isinstance(found, str):
        OUT.print(f"\n[bold]{name}[/] cannot be used: {escape(found)}")
        return
    OUT.print(f"\n[bold]{name}[/]: {escape(', '.join(found.devices))}")
    table = Table(f"layer ({found.judged})", "runs on", "why", header_style="bold", show_lines=True)
    for choice in found.layers:
        table.add_row(choice.layer, escape(choice.implementation), escape(choice.reason))
    OUT.print(table)
    for line in found.faster:
        OUT.print(f"for more speed: {escape(line)}")
