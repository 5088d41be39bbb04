"""Fixed shapes for packed batches: a compiled layer and a CUDA graph run one shape each.

A packed batch -> more padding and more entries of ``cu_seq_lens``, as segments of their own -> a batch whose shapes do
not depend on its documents. No token of a document changes, and nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.planning.packplan import PackPlan
from packing_core.storage.forest import depth_of
from torch_backend.pieces import padding_lengths

# How the names of tensors begin that are not one for each token.
OF_MEDIA = ("pixel", "image", "video", "spatial", "input_features", "feature_")
TOKENS_PER_SEGMENT = 64  # room for segments: rows whose documents are this long on average fit without a change of form


class FixedShapes:
    """``batch = fixed(batch)``: the largest number of rows, longest segment and number of segments seen so far.

    Sizes only grow, in steps: the number of segments by ``tokens / 64``, the longest segment to powers of two. So a run
    has few forms, and soon only one; only one at all if the sizes of its data are given.

    Args:
        tokens: of a row, to which batches of a single row are padded; None keeps their length.
        longest: a segment length that is expected.
        segments: a number of segments in a batch that is expected, padding not counted.

    Attributes:
        largest: the largest of each size over ranks whose batches shall have one form.
        forests: whether segments of the batches may continue others. Batches then say so on the device too, in
            ``packed_parent_index`` int32 [entries] and ``packed_depth``, the most segments that one continues.
    """

    def __init__(self, tokens: int | None = None, longest: int = 1, segments: int = 0) -> None:
        self.tokens = tokens or 0
        self.segments = segments
        self.longest = power_of_two(longest)
        self.rows = self.row_length = self.entries = 0
        self.forests, self.depth = False, 1
        self.largest: Callable[..., tuple[int, ...]] = lambda *sizes: sizes

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch, which :meth:`takes` takes, in fixed shapes."""
        lengths, boundaries = batch[BatchKey.LENGTHS], batch[BatchKey.BOUNDARIES]
        rows, length = batch["input_ids"].shape
        wide = max(length, self.tokens) if rows == 1 else length
        if wide != self.row_length:
            self.rows, self.row_length = 0, wide
        longest = power_of_two(max(*lengths, int(batch.get(BatchKey.LONGEST) or 1)))
        self.rows, self.longest = self.largest(max(self.rows, rows), max(self.longest, longest))
        longest = min(self.longest, wide)
        pieces = padding_lengths(rows * length, self.rows * wide, wide, longest)
        segments, step = (
            max(len(lengths) + len(pieces), self.segments),
            max(16, -(-self.rows * wide // TOKENS_PER_SEGMENT)),
        )
        entries = max(self.entries, -(-segments // step) * step, len(boundaries) - 1)
        (self.entries,) = self.largest(entries)
        fixed = {name: self._padded(name, x, (rows, length), longest) for name, x in batch.items()}
        ends = [rows * length + end for end in accumulate(pieces)]
        ends += [self.rows * wide] * (self.entries - len(lengths) - len(pieces))
        for name in (BatchKey.BOUNDARIES, BatchKey.KEY_BOUNDARIES):
            if isinstance(marks := batch.get(name), Tensor):
                more = torch.tensor(ends, dtype=marks.dtype).to(marks.device, non_blocking=True)
                fixed[name] = torch.cat((marks[: len(lengths) + 1], more))
        for name in (BatchKey.LONGEST, BatchKey.KEY_LONGEST):
            if batch.get(name) is not None:
                fixed[name] = longest
        if batch.get(BatchKey.DOCUMENTS) is None:  # every segment is a document, and the padding is none
            fixed[BatchKey.DOCUMENTS] = tuple((number,) for number in range(len(lengths)))
        if self.forests:
            parents = (*(batch.get(BatchKey.PARENTS) or (-1,) * len(lengths)), *[-1] * len(pieces))
            (self.depth,) = self.largest(max(self.depth, power_of_two(max(1, depth_of(parents)))))
            index = torch.full((self.entries,), -1, dtype=torch.int32)
            index[: len(parents)] = torch.tensor(parents, dtype=torch.int32)
            fixed[BatchKey.PARENT_INDEX] = index.to(boundaries.device, non_blocking=True)
            fixed |= {BatchKey.PARENTS: parents, BatchKey.DEPTH: self.depth}
        return fixed | {BatchKey.LENGTHS: (*lengths, *pieces)}

    def forget_rows(self) -> None:
        """Let the next batch say how many rows batches have."""
        self.rows = self.row_length = self.entries = 0

    @classmethod
    def of_rows(cls, longest: int, counts: NDArray[Any], rows: int = 1, tokens: int | None = None) -> FixedShapes:
        """Shapes of batches of ``rows`` rows: of segments at most ``longest``, ``counts`` [R] of them in each row."""
        most = np.sort(counts)[-rows:].sum() + rows  # each row may end in padding
        return cls(tokens, longest=int(longest), segments=int(most))

    @classmethod
    def of_plans(cls, plans: Sequence[PackPlan], rows: int = 1, tokens: int | None = None) -> FixedShapes:
        """As :meth:`of_rows`, of the rows of these plans."""
        counts = np.hstack([np.diff(plan.row_offsets) for plan in plans])
        return cls.of_rows(max(plan.length.max() for plan in plans), counts, rows, tokens)

    @staticmethod
    def takes(batch: Mapping[str, Any]) -> bool:
        """Returns whether a batch carries the lengths of its segments on the host, and their boundaries."""
        ids, lengths, boundaries = (batch.get(name) for name in ("input_ids", BatchKey.LENGTHS, BatchKey.BOUNDARIES))
        whole = isinstance(ids, Tensor) and ids.ndim == 2 and lengths is not None and sum(lengths) == ids.numel()
        return whole and isinstance(boundaries, Tensor)

    def _padded(self, name: str, x: Any, shape: tuple[int, int], longest: int) -> Any:
        """A value per token with padding after its last token; anything else as it is."""
        (rows, length), more = shape, self.rows * self.row_length - shape[0] * shape[1]
        if not more or not isinstance(x, Tensor) or x.shape[-2:] != (rows, length) or name.startswith(OF_MEDIA):
            return x
        if name == "token_type_ids":  # as the last token, which is of no prefix that would see both ways
            flat = torch.cat((x.flatten(-2), x.flatten(-2)[..., -1:].expand(*x.shape[:-2], more)), -1)
            return flat.view(*x.shape[:-2], self.rows, self.row_length)
        if name == "position_ids" or name == BatchKey.NUMBERS:
            behind = rows * (self.row_length - length)  # in the only row; more rows are whole ones
            count = torch.arange(more, dtype=x.dtype, device=x.device) - behind  # below 0: behind the row's last token
            first, each = (-(-size // longest) for size in (behind, self.row_length))
            place = torch.where(count < 0, count + behind, count % self.row_length)
            piece = place // longest + torch.where(count < 0, 0, first + count // self.row_length * each)
            new = place % longest if name == "position_ids" else x.flatten()[-1] + 1 + piece
            flat = torch.cat((x.flatten(-2), new.expand(*x.shape[:-2], -1)), -1)
            return flat.view(*x.shape[:-2], self.rows, self.row_length)
        fill = IGNORE_INDEX if name in ("labels", "shift_labels") else 0
        return F.pad(x, (0, self.row_length - length, 0, self.rows - rows), value=fill)


def power_of_two(length: int) -> int:
    """Returns the lowest power of two that is not below a length of at least 1."""
    return 1 << (length - 1).bit_length()
