"""The choice of a router: which of its calls of ``topk`` makes it, and how to make it again.

``observe(call)`` runs a router and says what it chose; ``choose(call, choice, ...)`` runs it with given experts. Both
see the router's calls of ``torch.topk`` through a TorchFunctionMode, so one mechanism serves every router that ranks
its experts by ``topk``, whatever it makes of the values. Exchanging the indices that the experts receive would not do:
the routing weights are the values of the same ``topk``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class TopK:
    """Tells which call of ``topk`` makes a router's choice.

    Attributes:
        call: the number of the call of ``topk`` that ranks experts, the last one.
        experts: E, how many it ranks.
        top_k: K, how many it takes.
    """

    call: int
    experts: int
    top_k: int


def observe(call: Callable[[], Any]) -> tuple[Any, TopK | None, Tensor | None]:
    """Returns a router's output, how it chose, and the experts [T, K]; None and None if it calls no ``topk``."""
    with _Observed() as seen:
        output = call()
    if seen.indices is None:
        return output, None, None
    indices = seen.indices.detach().flatten(0, -2)
    return output, TopK(seen.calls - 1, seen.experts, indices.shape[-1]), indices


def choose(call: Callable[[], Any], choice: TopK, places: Tensor, indices: Tensor) -> Any:
    """Returns a router's output with given experts.

    Args:
        call: runs the router.
        choice: as :func:`observe` found it.
        places: int64 [N], the tokens whose experts are given; the router chooses for the others.
        indices: int64 [N, K].
    """
    with _Chosen(choice, places, indices):
        return call()


class _Observed(TorchFunctionMode):
    """Counts the calls of ``topk`` and keeps the last one's indices."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.experts = 0
        self.indices: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.calls += 1
            scores: Tensor = args[0] if args else kwargs["input"]
            self.experts, self.indices = scores.shape[-1], result[1]
        return result


class _Chosen(TorchFunctionMode):
    """Replaces the choice; before it, lets groups be chosen that hold the given experts.

    A router that chooses groups first hides the experts of all others from ``topk``, values included.
    """

    def __init__(self, choice: TopK, places: Tensor, indices: Tensor) -> None:
        super().__init__()
        self.choice, self.places, self.indices = choice, places, indices
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        number, self.calls = self.calls, self.calls + 1
        if args:
            scores, args = args[0], args[1:]
        else:
            scores, kwargs = kwargs["input"], {n: x for n, x in kwargs.items() if n != "input"}
        if number == self.choice.call:
            own = func(scores, *args, **kwargs)[1]
            taken = own.flatten(0, -2).index_copy(0, self.places, self.indices.to(own.dtype)).view_as(own)
            return torch.return_types.topk((scores.gather(-1, taken), taken))
        groups, experts = scores.shape[-1], self.choice.experts
        if scores.ndim == 2 and groups < experts and experts % groups == 0:
            group = self.indices // (experts // groups)
            scores = scores.index_put((self.places[:, None], group), scores.new_tensor(float("inf")))
        return func(scores, *args, **kwargs)
