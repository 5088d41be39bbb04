"""The documents of a packed batch as rows: how a head that reads whole rows gets one document in each of them.

    the model's arguments [B, S] -> DocumentRows.arguments -> the head sees n documents [n, W], padded at their ends
    hidden states [B, S, D]      -> DocumentRows.hidden    -> [n, W, D], which the head pools by its family's own rule

Between the two, the decoder runs on the packed rows. Documents stand in source order. W is 1 for
heads that read the last token, else the length of the longest document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.segments import PackedMetadata, host_lengths, to_device


class DocumentRows:
    """n documents of a packed batch as the rows of a padded one.

    Args:
        segments: of the batch, their lengths known on the host.
        documents: the numbers of each document's segments, in source order; None if every segment is a document.

    Attributes:
        index: int64 [n, W], the flat token at each place; places past the end of a document repeat its last token.
        real: bool [n, W], which places hold a token.

    Raises:
        LayoutError: there is no such segment, or a document stands in several.

    >>> rows = DocumentRows(PackedMetadata.from_lengths([2, 3, 1]), ((1,), (0,)))
    >>> rows.index.tolist(), rows.real.tolist()
    ([[2, 3, 4], [0, 1, 1]], [[True, True, True], [True, True, False]])
    """

    def __init__(self, segments: PackedMetadata, documents: Sequence[Sequence[int]] | None = None) -> None:
        lengths = np.asarray(host_lengths(segments), np.int64)
        if documents is None:
            documents = [(segment,) for segment in range(len(lengths))]
        split = next((number for number, found in enumerate(documents) if len(found) != 1), None)
        if split is not None:
            raise LayoutError(
                f"document {split} of the batch stands in {len(documents[split])} segments, and this model reads "
                'documents whole: pack them with overflow="error" or "truncate", in rows that hold the longest',
                option="overflow",
            )
        order = np.array([segment for (segment,) in documents], np.int64)
        if len(order) and not 0 <= order.min() <= order.max() < len(lengths):
            wrong = order[(order < 0) | (order >= len(lengths))][0]
            raise LayoutError(
                f"packed_documents names segment {wrong} and the batch has {len(lengths)}: pass the whole batch of a "
                "collator"
            )
        starts, kept = (np.cumsum(lengths) - lengths)[order], lengths[order]
        places = np.arange(kept.max(initial=1))
        index = starts[:, None] + np.minimum(places, kept[:, None] - 1)
        self.index = to_device(torch.from_numpy(index), segments.device)
        self.real = to_device(torch.from_numpy(places < kept[:, None]), segments.device)

    def __len__(self) -> int:
        return len(self.index)

    def keep_last(self, input_ids: Tensor | None, pad_id: int | None) -> None:
        """Keep one token of each document, as stock heads choose it: the last one that is not ``pad_id``.

        Args:
            input_ids: [B, S]; None for embedded documents, of which it is the last token.
            pad_id: the padding of the model, which may stand inside a document too.
        """
        counts = self.real
        if input_ids is not None:
            counts = counts & (input_ids.flatten()[self.index] != pad_id)
        places = torch.arange(self.index.shape[1], device=self.index.device)
        last = (places * counts).argmax(-1, keepdim=True)
        self.index, self.real = self.index.gather(1, last), torch.ones_like(last, dtype=torch.bool)

    def arguments(self, batch: Mapping[str, Any], pad_id: int | None) -> dict[str, Any]:
        """Returns a head's inputs from a batch: ids [n, W] or embeddings [n, W, D], and a mask [n, W], 0 at padding."""
        found: dict[str, Any] = {"attention_mask": self.real.long()}
        if isinstance(ids := batch.get("input_ids"), Tensor):
            found["input_ids"] = ids.flatten()[self.index].masked_fill(~self.real, pad_id or 0)
        if isinstance(embedded := batch.get("inputs_embeds"), Tensor):
            found["inputs_embeds"] = self.hidden(embedded)
        return found

    def hidden(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [n, W, D], 0 at padding."""
        rows = hidden.flatten(0, 1).index_select(0, self.index.flatten()).view(*self.index.shape, hidden.shape[-1])
        return rows.masked_fill(~self.real[..., None], 0)

    def first(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [n, 1, D]: the first token of each document; of the full width alone."""
        return hidden.flatten(0, 1).index_select(0, self.index[:, 0])[:, None]
