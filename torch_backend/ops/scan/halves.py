"""The interface of scans in two halves, between which the state before each segment may come from elsewhere.

    begin            inputs -> the last state of each segment, from zero
    finish           the states before the segments -> outputs
    begin_backward   gradients of outputs -> gradients of the states before the segments
    finish_backward  gradients of the last states -> gradients of inputs and parameters

Only the kernels that carry states from chunk to chunk run in both halves; all others run in one of them. The methods
are parts of an autograd function, :mod:`torch_backend.context_parallel.states`, and record nothing themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from torch_backend.segments import PackedMetadata

Tensors = Sequence[Tensor]


class HalvedScan(ABC):
    """A scan whose states fade by gates alone.

    Every method takes ``given``: the inputs [T, ...] and then the parameters, contiguous, and ``packed``, the segments
    of the T tokens. Those of the halves begin where chunks do. States are [S, ...] in float32, one for each segment.
    ``kept`` is what the backward needs beside what is given; ``work`` is what the second half needs of the first.

    Attributes:
        gates: which of the inputs holds the logs of the decays.
    """

    gates: int

    @abstractmethod
    def chunk(self, given: Tensors) -> int:
        """Returns the tokens of a chunk."""

    @abstractmethod
    def fade(self, states: Tensor, gates: Tensor, given: Tensors) -> Tensor:
        """Fades states [k, ...] by gates that sum to [k, ...]; the fading is diagonal, so it is its own adjoint."""

    @abstractmethod
    def forward(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensor, Tensors]:
        """Scans segments that start from zero, anywhere: the output [T, ...], and ``kept``."""

    @abstractmethod
    def backward(self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor) -> Tensors:
        """Returns the gradients of what was given to :meth:`forward`."""

    @abstractmethod
    def begin(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensors, Tensor]:
        """Returns ``work``, and the last states of segments that start from zero."""

    @abstractmethod
    def finish(self, given: Tensors, packed: PackedMetadata, work: Tensors, initial: Tensor) -> tuple[Tensor, Tensors]:
        """Returns the output [T, ...] of segments that start from ``initial``, and ``kept``."""

    @abstractmethod
    def begin_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor
    ) -> tuple[Tensors, Tensor]:
        """Returns ``work``, and the gradients of ``initial`` that come from the output alone."""

    @abstractmethod
    def finish_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor, work: Tensors, dfinal: Tensor
    ) -> Tensors:
        """Returns the gradients of what is given, from those of the output and of the last states.

        The last states include what is left of ``initial``, so the gradients of gates and parameters are complete:
        none is needed of the sums by which states fade.
        """
