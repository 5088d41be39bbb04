"""The token that predicts each one: the token before, and for the first one after a shared prefix the prefix's last.

    hidden states [B, S, D], labels [B, S] -> :class:`NextTokens` -> N hidden states and the target of each
    N results                              -> at_labels           -> [B, S], at the label's own token

In a batch without shared prefixes the N are the B * S tokens of the batch. With them, the last hidden state of a prefix
is there once more for every segment that continues it, and its gradient is their sum, made in float32. Of a batch that
is cut over ranks, each rank predicts with its own tokens, and every rank gets the results of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError
from torch_backend.context_parallel.exchange import own_tokens, whole_tokens
from torch_backend.context_parallel.share import RankShare
from torch_backend.ops.repeated import repeated
from torch_backend.segments import to_device

ROUNDED = 128  # rows of hidden states are a multiple of it, so that kernels see few sizes


class NextTokens:
    """Pairs each token of one batch with the token that predicts it.

    Args:
        batch: of a packed collator; only its host metadata are read.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        parents, index = batch.get(BatchKey.PARENTS), batch.get(BatchKey.PARENT_INDEX)
        self._most: int | None = batch.get(BatchKey.TARGETS)
        self._places: Tensor | None = None  # [2, E] the last token of each parent, the first token of its child
        self._real: Tensor | None = None  # bool [E] which of these there are; None for all
        if index is not None:  # as many for every batch
            starts, ends = (batch[BatchKey.BOUNDARIES][part].long() for part in (slice(None, -1), slice(1, None)))
            self._real = index >= 0
            places = torch.where(self._real, ends[index.clamp(min=0).long()] - 1, 0)
            self._places = torch.stack([places, torch.where(self._real, starts, 0)])
            return
        if parents is None or max(parents, default=-1) < 0:
            return
        if (given := batch.get(BatchKey.LENGTHS)) is None or len(given) != len(parents):
            raise LayoutError("packed_parents needs packed_lengths beside it, with one entry for each segment")
        lengths, above = np.array(given), np.array(parents)
        ends = np.cumsum(lengths)
        child = np.flatnonzero(above >= 0)
        self._places = torch.from_numpy(np.stack([ends[above[child]] - 1, (ends - lengths)[child]]))

    def hidden(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [1, N, D], those that predict; [B, S, D] as they are where no prefix is shared."""
        if self._places is None:
            return hidden
        flat = hidden.flatten(0, 1)
        again = repeated(flat, self._on(flat)[0])
        return torch.cat([flat, again])[None]

    def targets(self, labels: Tensor) -> Tensor:
        """Labels [B, S] at their own tokens -> the targets of what :meth:`hidden` returns, -100 for none."""
        return self._moved(labels, IGNORE_INDEX)

    def trained(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states [B, S, D] -> those that predict; labels and weights [B, S] -> their targets and weights.

        Of batches that say on the host how many targets they have at most, with few of those that have none. One that
        has more than it says gets NaN for its weights, and so for its loss, because nothing is read back here.
        """
        hidden, targets = self.hidden(hidden), self.targets(labels).to(hidden.device)
        weights = None if weights is None else self._moved(weights.to(hidden.device), 0)
        if self._most is None or self._places is not None:
            return hidden, targets, weights
        rows = max(1, -(-self._most // ROUNDED)) * ROUNDED
        if rows >= targets.numel():
            return hidden, targets, weights
        absent = targets.flatten() == IGNORE_INDEX
        first = absent.to(torch.uint8).argsort(stable=True)[:rows]

        def kept(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, first)[None]

        known = torch.where((~absent).sum() > rows, torch.nan, 1.0)
        made = (torch.ones_like(kept(targets), dtype=known.dtype) if weights is None else kept(weights)) * known
        return kept(hidden), kept(targets), made

    def candidates(self, ids: Tensor) -> Tensor:
        """Ids [B, S, K] at their labels, as :meth:`targets`."""
        return self._moved(ids, 0)

    def at_labels(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Results of what predicts, [B, S, ...] or [1, N, ...], at the tokens that are predicted: [B, S, ...]."""
        tokens = shape.numel()
        more = x.flatten(0, 1)[tokens:]
        x = x.flatten(0, 1)[:tokens].view(*shape, *x.shape[2:])
        moved = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if self._places is None:
            return moved
        flat, first = moved.flatten(0, 1), self._on(x)[1]
        if self._real is not None:  # what is none goes behind the last token
            first = torch.where(self._real, first, tokens)
            return torch.cat([flat, flat[:1]]).index_copy(0, first, more)[:tokens].view(moved.shape)
        return flat.index_copy(0, first, more).view(moved.shape)

    def _moved(self, x: Tensor, fill: int) -> Tensor:
        """[B, S, ...] from the tokens that are predicted to those that predict."""
        moved = torch.nn.functional.pad(x[:, 1:].movedim(1, -1), (0, 1), value=fill).movedim(-1, 1)
        if self._places is None:
            return moved
        first, flat = self._on(x)[1], moved.flatten(0, 1)
        again = x.flatten(0, 1).index_select(0, first)
        if self._real is None:
            flat = flat.index_fill(0, first - 1, fill)  # the token before in the row predicts nothing
        else:
            before = torch.where(self._real, first - 1, len(flat))
            flat = torch.cat([flat, flat[:1]]).index_fill(0, before, fill)[:-1]
            again = torch.where(self._real.view(-1, *[1] * (again.ndim - 1)), again, fill)
        return torch.cat([flat, again])[None]

    def _on(self, x: Tensor) -> Tensor:
        assert self._places is not None
        return to_device(self._places, x.device)


class NextTokensOverRanks(NextTokens):
    """As :class:`NextTokens`, for a batch of which this rank holds a part, whose labels were shifted before the cut.

    Args:
        share: the tokens that the rank holds.
    """

    def __init__(self, share: RankShare) -> None:
        super().__init__({})
        self.share = share

    def targets(self, labels: Tensor) -> Tensor:
        """The rank's labels [1, T], which stand at the tokens that predict them."""
        return labels

    def trained(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The rank's hidden states, labels and weights, which were shifted before the cut too."""
        return hidden, labels.to(hidden.device), None if weights is None else weights.to(hidden.device)

    def candidates(self, ids: Tensor) -> Tensor:
        """Ids [B, S, K] of the whole batch, at their labels -> those of the rank's targets, [1, T, K]."""
        return own_tokens(super().candidates(ids).flatten(0, 1), self.share)[None]

    def at_labels(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Results of the rank's tokens [1, T, ...] -> those of all ranks at the tokens predicted, [B, S, ...]."""
        return super().at_labels(whole_tokens(x[0], self.share)[None], shape)


def next_tokens_of(batch: Mapping[str, Any]) -> NextTokens:
    """Returns the pairs of a packed batch, whole or cut over ranks."""
    share = batch.get(BatchKey.SHARE)
    return NextTokens(batch) if share is None else NextTokensOverRanks(share)


def next_token_pairs(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the places of a batch that predict a token, and the tokens they predict, also behind shared prefixes.

    The last token of a shared prefix predicts the first one of everything that continues it, so it is there several
    times. ``packed_cross_entropy(logits.flatten(0, 1)[places], targets)`` is then the loss of the batch.

    Args:
        batch: of a packed collator, with ``labels`` [B, S].

    Returns:
        int64 [N] flat places in the batch, on the device of the labels, and int64 [N] targets, -100 for none.

    Raises:
        LayoutError: the batch has no labels, or its metadata contradict each other.

    >>> labels = torch.tensor([[-100, -100, 7, 8, 9]])  # a prefix of two tokens, and its answers 7 8 and 9
    >>> batch = {"labels": labels, "packed_lengths": (2, 2, 1), "packed_parents": (-1, 0, 0)}
    >>> places, targets = next_token_pairs(batch)
    >>> [(place, target) for place, target in zip(places.tolist(), targets.tolist()) if target != -100]
    [(2, 8), (1, 7), (1, 9)]
    """
    labels = batch.get("labels")
    if labels is None:
        raise LayoutError(f"next_token_pairs takes a batch with labels, got {', '.join(batch)}")
    pairs = NextTokens(batch)
    targets = pairs.targets(labels).flatten()
    places = torch.arange(labels.numel(), device=labels.device)
    if pairs._places is not None:
        places = torch.cat([places, pairs._on(labels)[0]])
    return places, targets
