"""Cuts a packed batch over the ranks of a context-parallel group, and says which models and batches cannot be cut.

A whole batch, checked -> :func:`cut_batch` -> the tokens of this rank, with the positions of their whole documents and
with targets that were shifted before the cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import UnsupportedError, UnsupportedModelError
from torch_backend.context_parallel.exchange import own_tokens
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.anatomy.families import ALIBI
from torch_backend.hf.anatomy.heads import takes_next_token_loss
from torch_backend.hf.anatomy.model import Anatomy
from torch_backend.hf.router import asks_for_router_loss, why_not_over_ranks
from torch_backend.segments import PackedMetadata, to_device

_PER_TOKEN = ("input_ids", "position_ids", "labels", "shift_labels", "loss_weights", "attention_mask")
_COMPARED = ("input_ids", "position_ids", "labels", "shift_labels")  # between ranks


def refuse_context(anatomy: Anatomy) -> None:
    """Raise for models whose documents cannot be cut over ranks.

    Raises:
        UnsupportedModelError: the reason.
    """
    reason = next(_reasons_against(anatomy), None)
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(anatomy.root).__name__} cannot be trained under context parallelism, because {reason}: "
            "call patch(model) without a mesh"
        )


def _reasons_against(anatomy: Anatomy) -> Iterator[str]:
    config = anatomy.decoder.config
    if anatomy.head != "next token" or not takes_next_token_loss(anatomy.root):
        yield "only the next-token loss of a causal language model is computed over ranks"
    if anatomy.route == "documents":
        yield f"its decoder runs as a whole on batches of documents ({anatomy.why})"
    if getattr(config, "attention_chunk_size", None):
        yield "its attention sees chunks of a document, which are not communicated"
    if config.model_type in ALIBI:
        yield "its attention adds ALiBi, which is not computed over ranks"
    if anatomy.indexers:
        yield "its indexers select among the keys of a whole document, which are not communicated"
    if anatomy.numbering is not None:
        yield "its decoder numbers the tokens of its input itself"
    if any(getattr(module, "layerdrop", 0) for module in anatomy.decoder.modules()):
        yield "it skips layers at random, and ranks would skip different ones (load it with layerdrop=0)"
    if anatomy.both_ways is not None and anatomy.both_ways.prefix:
        yield "the tokens of a document's prefix see each other both ways, and a rank may hold a part of them"
    if asks_for_router_loss(anatomy.root, {}) and (reason := why_not_over_ranks(anatomy.root)) is not None:
        yield f"the loss of its router is not computed over ranks, {reason} (set config.output_router_logits = False)"


def cut_batch(
    batch: Mapping[str, Any], segments: PackedMetadata, context: ContextGroup, *, masked: bool = False
) -> dict[str, Any]:
    """This rank's part of a packed batch.

    Args:
        batch: keyword arguments of a model, checked; the same on all ranks.
        segments: its documents, their lengths on the host, on the device of the model.
        context: the group.
        masked: keep the ``attention_mask``, which a router's loss reads.

    Returns:
        The batch with the rank's tokens in a row [1, T], ``position_ids`` of their whole documents, ``shift_labels`` if
        there were labels, and a :class:`RankShare` as ``packed_context``.

    Raises:
        UnsupportedError: the batch holds what cannot be cut.
    """
    others = sorted(
        name
        for name, x in batch.items()
        if isinstance(x, Tensor) and x.ndim > 0 and name not in (*_PER_TOKEN, *BatchKey.ALL)
    )
    if others or "input_ids" not in batch:
        what = ", ".join(others) if others else "no input_ids"
        raise UnsupportedError(
            f"a batch with {what} cannot be cut over ranks: context parallelism takes token ids alone"
        )
    if isinstance(batch.get("position_ids"), Tensor) and batch["position_ids"].ndim != 2:
        raise UnsupportedError("positions on several axes are not cut over ranks: leave position_ids out")
    assert segments.lengths is not None
    device = segments.device
    compared = [batch[name] for name in _COMPARED if batch.get(name) is not None]
    share = context.share(segments.lengths, *(to_device(x, device) for x in compared))
    share.documents = batch.get(BatchKey.DOCUMENTS)

    def cut(x: Tensor) -> Tensor:
        return own_tokens(to_device(x, device).reshape(-1), share)[None]

    found = {name: x for name, x in batch.items() if name not in (*_PER_TOKEN, *BatchKey.ALL)}
    found["input_ids"] = cut(batch["input_ids"])
    if batch.get("position_ids") is not None:
        found["position_ids"] = cut(batch["position_ids"])
    else:
        found["position_ids"] = to_device(torch.from_numpy(share.positions), device)[None]
    if batch.get("labels") is not None or batch.get("shift_labels") is not None:
        targets = batch.get("shift_labels")
        if targets is None:
            targets = _shifted(batch["labels"], segments.lengths, IGNORE_INDEX)
        found["labels"] = found["shift_labels"] = cut(targets)
    if masked and batch.get("attention_mask") is not None:
        found["attention_mask"] = cut(batch["attention_mask"])
    if batch.get("loss_weights") is not None:
        weights = batch["loss_weights"]
        shifted = batch.get("shift_labels") is not None
        found["loss_weights"] = cut(weights if shifted else _shifted(weights, segments.lengths, 0))
    found[BatchKey.SHARE] = share
    return found


def _shifted(x: Tensor, lengths: tuple[int, ...], last: int) -> Tensor:
    """[B, S] -> [B * S]: at each token what belongs to the next one, and ``last`` at the last of each document."""
    shifted = F.pad(x.reshape(-1)[1:], (0, 1), value=last)
    ends = torch.tensor(list(accumulate(lengths))) - 1
    return shifted.index_fill(0, to_device(ends, x.device), last)


def with_loss_over_ranks(output: Any, share: RankShare) -> Any:
    """Returns the output of a model, whose loss is of this rank's documents, with the loss of those of all ranks."""
    if isinstance(output, tuple):
        return MeanOverRanks.apply(output[0], share), *output[1:]
    output.loss = MeanOverRanks.apply(output.loss, share)
    return output


class MeanOverRanks(torch.autograd.Function):
    """Adds the parts of a loss over ranks; the gradients of the ranks are those of the loss after they are averaged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: RankShare) -> Tensor:
        ctx.ranks = share.ranks
        total = loss.clone()
        dist.all_reduce(total, group=share.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.ranks, None
