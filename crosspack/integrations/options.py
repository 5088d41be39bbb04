"""Options of Crosspack in the configuration of another stack, applied to the trainer that the stack built.

The entry ``crosspack`` of a configuration -> :func:`read_options` -> :func:`pack_trainer`, which calls
``enable_packing``, and ``audit`` where the configuration asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import crosspack
from packing_core.errors import PackingError
from packing_core.training.job import Audit


def read_options(given: Any, where: str, of: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Returns the options of a configuration: arguments of ``enable_packing``, and ``audit``, or those of a function.

    Args:
        given: the entry of the configuration; None and True stand for no options.
        of: the function whose arguments they are in place of these, all but its first.

    Raises:
        PackingError: ``given`` is no mapping, or names something that is no option.
    """
    if given is None or given is True:
        return {}
    known = [*signature(of or crosspack.enable_packing).parameters][1:] + ["audit"] * (of is None)
    if not isinstance(given, Mapping):
        raise PackingError(f"{where} is {given!r}: pass a mapping of options, which are {', '.join(known)}")
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise PackingError(f"{where} has no option {unknown[0]}: its options are {', '.join(known)}")
    return dict(given)


def pack_trainer(trainer: Any, options: Mapping[str, Any], **defaults: Any) -> None:
    """Enable packing in a trainer; with ``audit=True`` compare a batch of it with each document alone.

    Args:
        trainer: as the stack built it, before ``train()``.
        defaults: options that hold where ``options`` says nothing.

    Raises:
        ContaminationError: the audit finds that documents see each other.
        PackingError: as ``enable_packing``.
    """
    chosen = {**defaults, **options}
    audited = chosen.pop("audit", False)
    crosspack.enable_packing(trainer, **chosen)
    if not audited:
        return
    report = crosspack.audit(trainer)
    if trainer.is_world_process_zero():
        print(report)
    Audit(report.verdict == "exact", str(report)).checked()


def refuse(reasons: Mapping[str, str], given: Mapping[str, Any], stack: str) -> None:
    """Check that a configuration holds none of some options.

    Args:
        reasons: option of the stack -> why packing cannot follow it, and the way out.
        given: the configuration; options that are absent, None or False are off.

    Raises:
        UnsupportedError: an option is on.
    """
    for name, reason in reasons.items():
        if given.get(name) not in (None, False):
            raise crosspack.UnsupportedError(f"{stack}'s {name}={given[name]!r} {reason}")
