"""One step of a stack as a run records it, and a stack as it is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS, CAPACITY, STEP = 4, 64, 2  # rows of a micro-batch, tokens of a row, micro-batches of the one step
Documents = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Run:
    """One step of a stack.

    Attributes:
        name: of its trainer.
        config: of its model.
        before: the weights that it began with, by name.
        gradients: of the step, by name.
        documents: tokens and labels of all that it trained.
        steps: how many there were.
    """

    name: str
    config: Any
    before: dict[str, Any]
    gradients: dict[str, Any]
    documents: Documents
    steps: int


def weights_of(model: Any) -> dict[str, Any]:
    """Returns copies of a model's parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Stack:
    """A stack as it is released.

    Attributes:
        packages: what pip installs into its folder, without dependencies; torch is that of the environment.
        shown: packages whose versions are printed.
        train: runs its command in this process, on a folder of data and into another one; what it trained, if not by a
            trainer of transformers.
        stand_in: the folder in ``stand_ins`` whose signatures have to be those of the release; None if it has none.
        environment: variables of its process.
        absent: modules that it imports at its start and does not need here, which empty ones stand for, each with the
            classes that are imported from it: ``module:Class``.
        first: modules to import before that, which work without the absent ones.
        prepare: runs before its signatures are checked.
    """

    packages: tuple[str, ...]
    shown: tuple[str, ...]
    train: Callable[[Path, Path], list[Run] | None]
    stand_in: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    prepare: Callable[[], None] = _nothing
