"""Everything that packing changes of a trainer that somebody else built, in one list that can be taken back.

:func:`changing` takes back what the last call changed -> the caller sets attributes and adds callbacks through the
:class:`Changes` that it yields -> where that raises, the trainer is what the last call made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

_CHANGES = "_crosspack_changes"  # the attribute of a trainer that holds its Changes
_ABSENT = object()


class Changes:
    """The attributes and callbacks of one trainer that packing has set."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._values: list[tuple[MutableMapping[str, Any], str, Any, Any]] = []  # where, name, before, after
        self._callbacks: list[Any] = []

    def set(self, name: str, value: Any, *, of: Any = None) -> None:
        """Sets an attribute of the trainer, or of a part ``of`` it."""
        self.put(vars(self.trainer if of is None else of), name, value)

    def put(self, mapping: MutableMapping[str, Any], name: str, value: Any) -> None:
        """Sets an entry of a mapping."""
        self._values.append((mapping, name, mapping.get(name, _ABSENT), value))
        mapping[name] = value

    def wrap(self, name: str, function: Callable[..., Any], *arguments: Any, of: Any = None, **options: Any) -> None:
        """Puts ``function(method, *arguments, ...)`` in place of a method, which it gets as its first argument."""
        holder = self.trainer if of is None else of
        self.set(name, partial(function, getattr(holder, name), *arguments, **options), of=of)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback to the trainer."""
        self.trainer.add_callback(callback)
        self._callbacks.append(callback)

    def take_back(self) -> None:
        """Restores every value that is still the one set here; what was set in the meantime stays."""
        for mapping, name, before, after in reversed(self._values):
            _exchange(mapping, name, after, before)
        for callback in self._callbacks:
            if callback in self.trainer.callback_handler.callbacks:
                self.trainer.remove_callback(callback)

    def repeat(self) -> None:
        """Undoes :meth:`take_back`."""
        for mapping, name, before, after in self._values:
            _exchange(mapping, name, before, after)
        for callback in self._callbacks:
            self.trainer.add_callback(callback)


def _exchange(mapping: MutableMapping[str, Any], name: str, present: Any, value: Any) -> None:
    if mapping.get(name, _ABSENT) is not present:
        return
    if value is _ABSENT:
        mapping.pop(name, None)
    else:
        mapping[name] = value


@contextmanager
def changing(trainer: Any) -> Iterator[Changes]:
    """Yields the changes of a call in place of those of the last one; where it raises, nothing has changed."""
    last, changes = getattr(trainer, _CHANGES, None), Changes(trainer)
    if last is not None:
        last.take_back()
    try:
        yield changes
    except BaseException:
        changes.take_back()
        if last is not None:
            last.repeat()
        raise
    setattr(trainer, _CHANGES, changes)


def take_back(trainer: Any) -> bool:
    """Takes back all changes of a trainer; returns whether there were any."""
    changes = vars(trainer).pop(_CHANGES, None)
    if changes is not None:
        changes.take_back()
    return changes is not None
