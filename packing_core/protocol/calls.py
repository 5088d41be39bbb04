"""The arguments of a scan or a convolution as one object, for adapters that treat all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from packing_core.protocol.backend import require_declared
from packing_core.protocol.data import Array, Gradients

Outcome = tuple[Array, Gradients]


@dataclass(frozen=True)
class ScanCall:
    """One call of `scan`, `delta_rule`, `ssd` or `convolution`; see `Backend`.

    Attributes:
        operands: the arrays that have gradients, by name, in the order of the method's arguments.
        segment_ids, dtype, dout, parents: as the method takes them.
        options: all other arguments.
    """

    operands: dict[str, Array]
    segment_ids: Array
    dtype: str
    dout: Array | None
    options: dict[str, Any]
    parents: Array | None = None


def takes_call(*operands: str) -> Callable[[Callable[[Any, ScanCall], Outcome]], Callable[..., Outcome]]:
    """Makes a scan or the convolution of `Backend`, with these operands, from a method that takes a `ScanCall`.

    The made method refuses ``parents`` for a backend that does not declare "continued_segments".

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
            ids, parents = given.pop("segment_ids"), given.pop("parents", None)
            if parents is not None:
                require_declared(self, options={"continued_segments"})
            return run(self, ScanCall(taken, ids, dtype, dout, given, parents))

        return method

    return decorate
