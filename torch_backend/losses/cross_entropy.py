"""Packed cross-entropy as (sum, weight) pairs that are divided once, over all tokens of a step on all ranks.

A mean of means is wrong as soon as rows, microbatches or ranks hold different numbers of targets, so nothing here
returns a mean but :func:`normalise`, which is called once per step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError
from torch_backend.ops.divisor import Divisor
from torch_backend.ops.linear_cross_entropy import counted_targets


def next_token_targets(labels: Tensor) -> Tensor:
    """Labels [B, S] as models take them -> targets [B, S] of the logits at the same place, -100 at the last one.

    The labels at segment starts are -100 (PackedCollator sees to it), so no target crosses a boundary.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def packed_cross_entropy(
    logits: Tensor, targets: Tensor, *, weights: Tensor | None = None, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy and the summed weight of the targets.

    Args:
        logits: [..., V], any floating dtype; the softmax runs in float32 at least.
        targets: [...] integers, aligned with the logits (see :func:`next_token_targets`).
        weights: [...] weight of each target; 1 if None.
        ignore_index: targets that do not count.

    Returns:
        Two scalars, float32 at least. A target that is no class makes the loss and its gradients NaN, unless its weight
        is 0.

    Raises:
        LayoutError: the shapes contradict each other.
    """
    if logits.shape[:-1] != targets.shape or (weights is not None and weights.shape != targets.shape):
        given = f", weights {list(weights.shape)}" if weights is not None else ""
        raise LayoutError(
            f"logits are [..., V] and targets and weights [...], got {list(logits.shape)}, {list(targets.shape)}{given}"
        )
    working = torch.promote_types(logits.dtype, torch.float32)
    weights = None if weights is None else weights.flatten()
    labels, counted, valid = counted_targets(
        targets.flatten(), weights, classes=logits.shape[-1], ignore_index=ignore_index, dtype=working
    )
    losses = F.cross_entropy(logits.flatten(0, -2).to(working), labels, ignore_index=ignore_index, reduction="none")
    return (losses * counted).sum() * valid, counted.sum()


def normalise(loss_sum: Tensor, weight_sum: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the mean over the targets of all ranks, scaled so that gradients averaged over ranks are those of it.

    Without any target it is 0, and so are its gradients.

    Args:
        loss_sum, weight_sum: this rank's, over all microbatches of the step.
        group: the ranks that hold different documents; the default group if None. Without torch.distributed: one rank.
    """
    divisor = Divisor(group)
    return divisor.mean(loss_sum, divisor.total(weight_sum.detach().clone()))
