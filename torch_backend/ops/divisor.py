"""Divides the sums of a step by its targets, or by their weights, in all microbatches and on all ranks.

Sums of a microbatch -> added up over microbatches -> :meth:`Divisor.total` over ranks -> :meth:`Divisor.mean` once per
step. Every division of a loss goes through :func:`quotient`, so a step without a target has a loss of 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def quotient(total: Tensor, weight: Tensor) -> Tensor:
    """Returns a sum divided by the number or weight of its terms; 0 where there is none, and so are its gradients."""
    return total / torch.where(weight == 0, 1, weight)


def part_of_mean(loss: Tensor, share: Tensor) -> Tensor:
    """Returns a mean over targets as a part of the step's sum or mean; 0 if there was no target, whose mean is NaN.

    Args:
        share: the number of these targets, or their part of the step's.
    """
    return torch.where(share > 0, loss, torch.zeros_like(loss)) * share.to(loss.device)


class Divisor:
    """Divides sums of ranks that hold different documents.

    Args:
        group: these ranks; the default group if None. Without torch.distributed: one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1

    def total(self, x: Tensor) -> Tensor:
        """Adds up a tensor over the ranks, in place, and returns it."""
        if self.ranks > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def average(self, x: Tensor) -> Tensor:
        """Returns the mean of a tensor over the ranks, without gradient."""
        return self.total(x.detach().clone()) / self.ranks

    def mean(self, total: Tensor, weight: Tensor) -> Tensor:
        """Returns the quotient of this rank's sum and the weight of all ranks, times the number of ranks.

        So gradients that are averaged over the ranks are those of the mean over all targets.
        """
        return quotient(total * self.ranks, weight)
