"""Audits over the ranks of a context-parallel group: what each computes of its part, as one process has it of all.

Outputs of a rank's tokens -> :func:`whole_outputs`, those of the whole batch on every rank; gradients of the ranks ->
:func:`averaged`. Every rank then compares the same figures with each document alone, which every rank runs itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packing_core.batches.keys import BatchKey
from packing_core.errors import UnsupportedError
from torch_backend.context_parallel.exchange import whole_tokens
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.patch import context_of, cut_over_ranks
from torch_backend.ops.divisor import Divisor


def whole_outputs(model: nn.Module, batch: Mapping[str, Any], outputs: Tensor) -> Tensor:
    """Outputs [T, ...] of the rank's part of a packed batch as those of the whole batch [B * S, ...], on every rank.

    Gradients that are averaged over ranks are those of one process, if every rank takes the same loss of the result.
    """
    share: RankShare = cut_over_ranks(model, batch)[BatchKey.SHARE]
    return whole_tokens(outputs, share)


def averaged(model: nn.Module, gradients: Mapping[str, Tensor], context: ContextGroup) -> dict[str, Tensor]:
    """Returns the mean over ranks of a model's gradients; a rank without one of a parameter counts as zero."""
    average = Divisor(context.group).average
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: average(gradients[name] if name in gradients else torch.zeros_like(p)) for name, p in trained.items()}


def refuse_several_devices(trainer: Any) -> None:
    """Raise if a rank of a trainer has parts of the model or batches of its own.

    Raises:
        UnsupportedError
    """
    context = context_of(trainer.model)
    if context is not None:
        if trainer.args.world_size > context.ranks or any(isinstance(p, DTensor) for p in trainer.model.parameters()):
            raise UnsupportedError(
                f"audit {type(trainer).__name__} on one group of {context.ranks} ranks, before train() shards its model"
            )
        return
    shards = any(getattr(trainer, kind, False) for kind in ("is_deepspeed_enabled", "is_fsdp_enabled"))
    if shards or trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
        raise UnsupportedError(
            f"{type(trainer).__name__} spreads its model or its batches over devices: "
            "audit it in one process that sees one"
        )
