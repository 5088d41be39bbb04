"""The arguments of an operation as one object, for adapters, which need no signature of their own then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

from packing_core.protocol.backend import require_declared
from packing_core.protocol.data import Array, Gradients
from packing_core.protocol.operations import Operations

Outcome = tuple[Array, Gradients]


@dataclass(frozen=True)
class OperationCall:
    """One call of a method of `Operations`.

    Attributes:
        operands: the arrays that have gradients, by name, in the order that `takes_call` names; those that are None
            are left out.
        segment_ids, dtype, dout, parents: as the method takes them, where it does.
        options: all other arguments that were passed.
    """

    operands: dict[str, Array]
    segment_ids: Array
    dtype: str
    dout: Array | None
    options: dict[str, Any]
    parents: Array | None = None


ScanCall = OperationCall  # the name of 0.3, when scans alone were passed like this


def takes_call(*operands: str) -> Callable[[Callable[[Any, OperationCall], Outcome]], Callable[..., Outcome]]:
    """Makes the operation of that name, with these operands, from a method that takes an `OperationCall`.

    The made method refuses ``parents`` for a backend that does not declare "continued_segments".

    >>> class Stack:
    ...     @takes_call("x", "dt", "A", "B", "C")
    ...     def scan(self, call):
    ...         return list(call.operands), call.dtype
    >>> Stack().scan(1, 2, 3, 4, 5, segment_ids=6, dtype="float32")
    (['x', 'dt', 'A', 'B', 'C'], 'float32')
    """

    def decorate(run: Callable[[Any, OperationCall], Outcome]) -> Callable[..., Outcome]:
        operation = getattr(Operations, run.__name__, None)  # None of a function that several operations share
        names = [*operands, "segment_ids"] if operation is None else [*signature(operation).parameters][1:]

        @wraps(run)
        def method(self: Any, *arrays: Array, dtype: str, dout: Array | None = None, **given: Any) -> Outcome:
            given |= zip(names[: len(arrays)], arrays, strict=True)
            taken = {name: x for name in operands if (x := given.pop(name, None)) is not None}
            ids: Any = given.pop("segment_ids", None)
            parents = given.pop("parents", None)
            if parents is not None:
                require_declared(self, options={"continued_segments"})
            return run(self, OperationCall(taken, ids, dtype, dout, given, parents))

        return method

    return decorate
