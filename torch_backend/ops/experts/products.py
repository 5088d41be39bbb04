"""The steps of a layer of experts: the interface that each implementation fills, and what they exchange.

A place is a (token, choice) in an order sorted by expert. ``S = T * K`` places are held; those after the last expert's
belong to no expert, hold nothing and are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from packing_core.reference import ExpertActivation
from torch_backend.ops.experts.request import ExpertsRequest


class Places(NamedTuple):
    """Tokens sorted by expert.

    Attributes:
        order: int32 [S], ``token * K + choice`` at each place. places: int32 [T, K], the inverse, -1 for no expert.
        offsets: int32 [E+1], where each expert's places begin.
        indices: [T, K], as they were given.
    """

    order: Tensor
    places: Tensor
    offsets: Tensor
    indices: Tensor

    @property
    def top_k(self) -> int:
        return self.places.shape[1]

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def mean(self) -> float:
        """The mean number of places per expert, if every place is one of an expert's."""
        return self.order.shape[0] / self.experts


@dataclass
class ByToken:
    """A factor of a product with a line for each token, x [T, D], which is read at each place of the token."""

    x: Tensor
    _gathered: Tensor | None = None

    def in_order(self, gather: Callable[[Tensor, Places], Tensor], routing: Places) -> Tensor:
        """[S, D], each place's line, gathered when it is first asked for and kept for products that follow."""
        if self._gathered is None:
            self._gathered = gather(self.x, routing)
        return self._gathered


Factor = Tensor | ByToken  # of a product: a line for each place, or for each token


class LowRank(NamedTuple):
    """The second half of an adapter's product: t [S, R] at each place, b [E, N, R]."""

    t: Tensor
    b: Tensor


@dataclass(frozen=True)
class ExpertProduct:
    """One product of a layer, ``scale w_e a + b_e t + bias_e`` at a place of expert e.

    Attributes:
        w: [E, N, K], any strides. bias: [E, N].
        adapter: the second half of a low-rank addition.
        scale: of ``w`` alone.
    """

    w: Tensor
    bias: Tensor | None = None
    adapter: LowRank | None = None
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """The rank of the adapter, 0 for none."""
        return 0 if self.adapter is None else self.adapter.t.shape[1]


@dataclass(frozen=True)
class Between:
    """The activation between the products, and whether gates and values alternate."""

    activation: ExpertActivation
    interleaved: bool = False

    def columns(self, inner: int) -> tuple[int, int]:
        """``(step, second)``: gates are columns ``step * i`` of the first product, values ``second + step * i``."""
        return (2, 1) if self.interleaved else (1, inner)


class Products(Protocol):
    """One way to compute the steps. Weights are [E, N, K] views of any strides; other factors have no gaps.

    A factor is [S, D], a line for each place, or :class:`ByToken`.
    """

    def supports(self, request: ExpertsRequest) -> str | None:
        """Returns None, or a clause why it is not supported."""
        ...

    def route(self, indices: Tensor, experts: int) -> Places:
        """Sort by expert; entries of one expert keep their order."""
        ...

    def rows(self, a: Factor, by: ExpertProduct, routing: Places) -> Tensor:
        """The product [S, N] of a [S, K]."""
        ...

    def up(self, x: ByToken, by: ExpertProduct, routing: Places, between: Between) -> tuple[Tensor, Tensor]:
        """The first product [S, O] and its activation [S, I]."""
        ...

    def down_backward(
        self, dy: ByToken, by: ExpertProduct, z: Tensor, weights: Tensor, routing: Places, between: Between
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From dy and the first product z: its gradient [S, O], ``weight * h`` [S, I], and that of the weights.

        The last is [T, K], in float32 (float64 for float64). ``by`` is the backward of the second product, w [E, I, D];
        its bias [E, D] is that of the forward.
        """
        ...

    def outer(self, a: Factor, b: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """The sum of ``a_s b_s^T`` over each expert's places, in the shape, strides and dtype of ``like``.

        With weights [T, K], b is weighted at each place.
        """
        ...

    def sums(self, a: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """[E, N], dtype of ``like``: the sum of a over each expert's places, weighted with weights [T, K]."""
        ...

    def combine(self, y: Tensor, routing: Places, weights: Tensor | None) -> Tensor:
        """[T, N]: the sum of y [S, N] over a token's choices in their order."""
        ...
