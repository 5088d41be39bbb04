"""Documents of a row whose common beginnings the decoder computes once, while everything around it sees them whole.

    the row [1, T'] of whole documents -> the decoder's arguments at T tokens, each beginning once -> its layers
                                       -> hidden states of T tokens -> the row [1, T'] again -> head, loss, caller

So a trainer's own loss stays as it is: it reads hidden states of whole documents, and the gradient of a shared one is
the sum over its documents, made in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import Ragged, pack_tree
from packing_core.batches.documents import segments_by_document
from packing_core.errors import UnsupportedModelError
from packing_core.storage.segment_indexing import indexes
from torch_backend.ops.repeated import repeated
from torch_backend.segments import PackedMetadata, to_device

SHARED_ROW = "shared_row"  # the key under which a call of a patched model hands a SharedRow on to its entry


@dataclass(frozen=True, eq=False)
class SharedRow:
    """A row of whole documents, and its tokens with each common beginning once.

    Attributes:
        segments: of the T tokens, with parents.
        take: int64 [T] the place of each of them in the row.
        give: int64 [T'] the token of these T at each place of the row.
    """

    segments: PackedMetadata
    take: Tensor
    give: Tensor

    def shrink(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A decoder's arguments at the T tokens.

        Raises:
            UnsupportedModelError: one of them is neither [1, T', ...] nor positions on several axes [3, 1, T'], so that
            nothing says which token its values belong to.
        """
        return {name: self._shrunk(name, x) if isinstance(x, Tensor) else x for name, x in kwargs.items()}

    def _shrunk(self, name: str, x: Tensor) -> Tensor:
        if x.ndim == 0 or name == "cache_position":
            return x
        row = 1, len(self.give)
        if x.shape[:2] == row:
            return x.index_select(1, self.take)
        if x.ndim == 3 and x.shape[1:] == row:
            return x.index_select(2, self.take)
        raise UnsupportedModelError(
            f"its decoder takes {name} {list(x.shape)}, which shared prefixes cannot shorten: pass share_prefix=False"
        )

    def grow(self, output: Any) -> Any:
        """A decoder's output at the T' places of the row."""
        if isinstance(output, tuple):
            return tuple(self._grown(x) for x in output)
        for name, value in output.items():
            output[name] = self._grown(value)
        return output

    def _grown(self, x: Any) -> Any:
        if isinstance(x, tuple | list):
            return tuple(self._grown(each) for each in x)
        if not isinstance(x, Tensor) or x.shape[:2] != (1, len(self.take)):
            return x
        return repeated(x[0], self.give)[None]


class RowIds:
    """The token ids of a batch's documents on the host, which a collator adds, so that no call reads the device.

    What moves tensors leaves it as it is. The policy and the reference of a trainer find the same beginnings in it, and
    the second one does not look again.

    Attributes:
        ids: int [T'] of the documents, one after the other.
    """

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids
        self._found: dict[int, SharedTokens] = {}

    def shared(self, lengths: Sequence[int], *, shortest: int) -> SharedTokens:
        """As :func:`shared_tokens`, of which each is found once."""
        if shortest not in self._found:
            self._found[shortest] = shared_tokens(self.ids, lengths, shortest=shortest)
        return self._found[shortest]


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The common beginnings of the documents of a row, on the host.

    Attributes:
        lengths, parents: of the segments.
        take, give: as those of a :class:`SharedRow`.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    take: NDArray[np.int64]
    give: NDArray[np.int64]

    def row(self, device: torch.device | str) -> SharedRow:
        """The shared row, with segments of its own: what a call derives from them may not outlive it."""
        segments = PackedMetadata.from_lengths(self.lengths, device=device, parents=self.parents)
        return SharedRow(segments, *(to_device(torch.from_numpy(x), device) for x in (self.take, self.give)))


def shared_tokens(ids: NDArray[Any], lengths: Sequence[int], *, shortest: int) -> SharedTokens:
    """Find the common beginnings of the documents of a row.

    Args:
        ids: [T'] token ids of the documents, one after the other; lengths: of each.
        shortest: a common beginning of fewer tokens is not shared.
    """
    documents = Ragged.of([part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])])
    untrained = [np.zeros(length, np.bool_) for length in lengths]  # a target is read from the whole row
    options: dict[str, Any] = {"strategy": "sequential", "seed": None, "loss_mask": untrained}
    tree = pack_tree(documents, len(ids), shortest=shortest, **options)
    _, order, _ = segments_by_document(tree)
    give = indexes(tree.flat_starts[order], tree.lengths[order])
    take = np.empty(tree.n_tokens, np.int64)
    take[give[::-1]] = np.arange(len(give))[::-1]
    assert tree.parents is not None
    return SharedTokens(tuple(tree.lengths.tolist()), tuple(tree.parents.tolist()), take, give)
