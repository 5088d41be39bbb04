"""How a batch's segments reach every layer: PackedMetadata in the place of an attention mask.

:func:`torch_backend.hf.boundaries.take_metadata` -> PackedMetadata -> :class:`CarriedMask`, which stands where an
attention mask would and so reaches every layer as an argument.
"""

from __future__ import annotations

from torch.nn.attention.flex_attention import BlockMask

from torch_backend.segments import PackedMetadata


class CarriedMask(BlockMask):
    """The metadata in the place of a 4-D attention mask.

    transformers hands a mask of four dimensions on to every layer as it is, be it a tensor or a ``BlockMask``; being
    the latter and no tensor, this one is neither cast nor split nor detached on the way, by nobody.
    """

    def __init__(self, packed: PackedMetadata, shape: tuple[int, int], implementation: str | tuple[str, ...]) -> None:
        self.packed = packed
        self.implementation = implementation
        self._shape = (shape[0], 1, shape[1], shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def __repr__(self) -> str:
        return f"CarriedMask({list(self._shape)}, {self.packed.tokens} tokens)"

    __str__ = __repr__
