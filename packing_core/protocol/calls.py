"""The arguments of a scan as one object, for adapters that treat all scans alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from packing_core.protocol.data import Array, Gradients

Outcome = tuple[Array, Gradients]


@dataclass(frozen=True)
class ScanCall:
    """One call of `scan`, `delta_rule` or `ssd`; see `Backend`.

    Attributes:
        operands: the arrays that have gradients, by name, in the order of the method's arguments.
        segment_ids, dtype, dout: as the method takes them.
        options: all other arguments.
    """

    operands: dict[str, Array]
    segment_ids: Array
    dtype: str
    dout: Array | None
    options: dict[str, Any]


def takes_call(*operands: str) -> Callable[[Callable[[Any, ScanCall], Outcome]], Callable[..., Outcome]]:
    """Makes a scan of `Backend`, with these operands, from a method that takes a `ScanCall`.

    >>> class Stack:
    ...     @takes_call("x", "dt", "A", "B", "C")
    ...     def scan(self, call):
    ...         return list(call.operands), call.dtype
    >>> Stack().scan(1, 2, 3, 4, 5, segment_ids=6, dtype="float32")
    (['x', 'dt', 'A', 'B', 'C'], 'float32')
    """

    def decorate(run: Callable[[Any, ScanCall], Outcome]) -> Callable[..., Outcome]:
        @wraps(run)
        def method(self: Any, *arrays: Array, dtype: str, dout: Array | None = None, **given: Any) -> Outcome:
            names = (*operands, "segment_ids")[: len(arrays)]
            given |= zip(names, arrays, strict=True)
            taken = {name: given.pop(name) for name in operands}
            return run(self, ScanCall(taken, given.pop("segment_ids"), dtype, dout, given))

        return method

    return decorate
