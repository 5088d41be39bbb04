"""Placeholder for the cache in the output of a call that made none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from packing_core.errors import UnsupportedError
from torch_backend.hf.inputs.arguments import CACHES


class NoCacheError(UnsupportedError, AttributeError):
    """An AttributeError too, so that ``hasattr`` answers no."""


class NoCache:
    """Stands for the cache that a padded call would have returned; every read raises.

    Most models make a cache unless they are told not to. None in its place would let a loop that generates go on
    without the tokens before.
    """

    def __getattr__(self, name: str) -> Any:
        self._raise()

    def __len__(self) -> int:
        self._raise()

    def __getitem__(self, index: Any) -> Any:
        self._raise()

    @staticmethod
    def _raise() -> NoReturn:
        raise NoCacheError(
            "the call of this model ran without its padding (crosspack.unpad), and so made no cache: pass "
            "use_cache=True, and it runs padded and makes one"
        )

    @classmethod
    def refuse(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise if the arguments of a call hold one."""
        if any(isinstance(value, cls) for value in kwargs.values()):
            cls._raise()

    @classmethod
    def in_place(cls, output: Any) -> Any:
        """A model's output with one where a cache would stand."""
        names = [name for name in CACHES if name in type(output).__dataclass_fields__ and output.get(name) is None]
        return type(output)(**{**output, **{name: cls() for name in names}})
