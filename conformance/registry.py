"""Names to backends: entry points of ``crosspack.backends`` and ``crosspack.peers``, or ``package.module:attribute``.

    reference            the whole family of an entry point
    torch:sdpa           one backend of a family
    mystack.gate:stack   an attribute of a module: a `Backend` (class or object) or a ``backends()`` function

Nothing here knows a backend by name, and none is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from packing_core.errors import MissingExtraError, PackingError, UnsupportedError
from packing_core.protocol import Backend, Capabilities

GROUP = "crosspack.backends"
PEERS = "crosspack.peers"  # libraries of others, which are judged when they are asked for
CANNOT_RUN = (UnsupportedError, MissingExtraError)  # with the reason: the backend does not exist on this machine


class LoadError(PackingError):
    """A backend that was asked for cannot be loaded."""


@dataclass
class Roster:
    """Implementations that take part in a run, and those left out with the reasons."""

    backends: dict[str, Backend] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


def registered(group: str = GROUP) -> dict[str, Callable[[], Any]]:
    """Entry point name -> function that imports it."""
    return {point.name: point.load for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def load(asked: Iterable[str] = (), *, interpreted: bool = False) -> Roster:
    """Make the backends that were asked for, or all that are registered when none was.

    Args:
        interpreted: of those that are registered, also the ones whose kernels would run in an interpreter here.

    Raises:
        LoadError: a backend that was asked for does not load, or none of a family that was asked for runs here.
    """
    roster = Roster()
    for name in asked:
        _load_asked(name, roster)
    if not roster.backends and not roster.not_run:
        for family, point in registered().items():
            try:
                offered = point()()
            except CANNOT_RUN as reason:
                roster.not_run[family] = str(reason)
                continue
            _make(_full_names(family, offered), roster)
        if not interpreted:
            slow = [name for name, backend in roster.backends.items() if backend.capabilities.interpreted]
            for name in slow:
                del roster.backends[name]
                roster.not_run[name] = "its kernels would run in an interpreter: name it, or pass --all"
    return roster


def _load_asked(name: str, roster: Roster) -> None:
    family, _, attribute = name.partition(":")
    points = registered() | registered(PEERS)
    before = len(roster.backends)
    try:
        if family in points:
            offered = _full_names(family, points[family]()())
            if attribute and name not in offered:
                raise LoadError(f"{family} offers {', '.join(offered)}")
            _make({name: offered[name]} if attribute else offered, roster)
        elif attribute:
            _make(_offered_by(name, getattr(import_module(family), attribute)), roster)
        else:
            raise LoadError(f"registered are {', '.join(points)}; anything else is package.module:attribute")
    except Exception as error:  # whatever a stranger's module raises, the run must say which backend it was
        raise LoadError(f"backend {name!r} was asked for and does not load: {_said(error)}") from error
    if len(roster.backends) == before:
        if not roster.not_run:
            raise LoadError(f"backend {name!r} was asked for and offers no backend")
        reasons = "; ".join(f"{other}: {reason}" for other, reason in roster.not_run.items())
        raise LoadError(f"backend {name!r} was asked for and cannot run here: {reasons}")


def _offered_by(name: str, found: Any) -> Mapping[str, Callable[[], Backend]]:
    """Returns the backends of an attribute: itself, or each entry of the mapping that it returns."""
    made = found if isinstance(found, Backend | Mapping) else found()
    if isinstance(made, Mapping):
        return {f"{name}:{entry}": factory for entry, factory in made.items()}
    if not isinstance(made, Backend):
        raise LoadError(f"{name} gives a {type(made).__name__}, which is not a packing_core.protocol.Backend")
    return {name: lambda: made}


def _full_names(family: str, offered: Mapping[str, Callable[[], Backend]]) -> dict[str, Callable[[], Backend]]:
    return {family if entry == family else f"{family}:{entry}": factory for entry, factory in offered.items()}


def _make(offered: Mapping[str, Callable[[], Backend]], roster: Roster) -> None:
    for name, factory in offered.items():
        try:
            backend = factory()
        except CANNOT_RUN as reason:
            roster.not_run[name] = str(reason)
            continue
        if not isinstance(backend.capabilities, Capabilities):
            raise LoadError(
                f"{name} has {backend.capabilities!r} for capabilities, not packing_core.protocol.Capabilities"
            )
        roster.backends[name] = backend


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, PackingError) else f"{type(error).__name__}: {error}"
