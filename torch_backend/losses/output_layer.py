"""The cross-entropy of an output layer applied to hidden states, without all of its logits.

A plain linear layer: its weight and bias go into :mod:`torch_backend.ops.linear_cross_entropy`. Any other module (LoRA
adapters, quantised weights, tensor parallelism, forward hooks): the module itself is called on a chunk of the hidden
states at a time, in the forward and again in the backward. So the loss contains whatever the layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from packing_core.errors import UnsupportedModelError
from torch_backend.losses.cross_entropy import packed_cross_entropy
from torch_backend.ops.linear_cross_entropy import linear_cross_entropy

CHUNK_BYTES = 2**30  # float32 logits of one chunk


# The names by which configs of the known families keep the scale and softcap of their logits.
MULTIPLIED_BY, DIVIDED_BY = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
CAPPED_AT = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class Tail:
    """What a model does to the values of its output layer: ``scale``, then ``softcap * tanh(logits / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def candidates(cls, config: Any) -> list[Tail]:
        """What a model of this config may do. The names do not decide it: some families scale hidden states instead."""

        def values(names: tuple[str, ...]) -> list[float]:
            found = (getattr(part, name, None) for part in (config, config.get_text_config()) for name in names)
            return [float(value) for value in found if value]

        scales = [1.0, *values(MULTIPLIED_BY), *(1 / value for value in values(DIVIDED_BY))]
        return [cls(scale, softcap) for scale in scales for softcap in (None, *values(CAPPED_AT))]

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def output_layer_loss(
    head: nn.Module, hidden: Tensor, targets: Tensor, *, weights: Tensor | None, tail: Tail, entries: int
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of ``tail(head(hidden))`` and the summed weight of the targets.

    Args:
        head: maps [..., D] to logits [..., V].
        hidden: [B, S, D].
        targets: [B, S] integers, -100 where nothing is predicted.
        weights: [B, S] weight of each target; 1 if None.
        tail: what happens to the logits.
        entries: V, to choose the size of chunks.

    Raises:
        UnsupportedModelError: the layer's weights are partitioned, and calling the layer does not gather them.
    """
    _refuse_scattered(head)
    if _is_linear(head):

        def fused(hidden: Tensor) -> tuple[Tensor, Tensor]:
            return _fused(head, hidden, targets, weights, tail)

        # FSDP's hooks gather the weight before the call, and watch its result for the backward.
        return _called_with(head, fused, hidden) if isinstance(head, FSDPModule) else fused(hidden)
    if isinstance(head, FSDPModule | FullyShardedDataParallel):
        # Every call communicates, so the number of calls must not depend on the rank's batch.
        return _loss_of_logits(head, hidden, targets, weights, tail)
    return _chunked(head, hidden, targets, weights, tail, rows=max(1, CHUNK_BYTES // (4 * entries)))


def _is_linear(head: nn.Module) -> bool:
    """Whether the module computes ``x @ weight.T + bias`` and nothing besides."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in head.__dict__:
        return False
    hooks = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    hooks += [*head._backward_pre_hooks.values(), *head._backward_hooks.values()]
    if any(not _is_of_fsdp(hook) for hook in hooks):
        return False
    return isinstance(head, FSDPModule) or not _is_wrapped_tensor(head.weight)


def _is_of_fsdp(hook: Any) -> bool:
    while not hasattr(hook, "__self__") and hasattr(hook, "__wrapped__"):  # those of a group of modules are wrapped
        hook = hook.__wrapped__
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def _is_wrapped_tensor(weight: Tensor) -> bool:
    """Whether the weight is a tensor subclass (quantised, distributed)."""
    return type(weight) not in (Tensor, nn.Parameter) and not isinstance(weight, torch._subclasses.FakeTensor)


def _refuse_scattered(head: nn.Module) -> None:
    """Raise for partitioned weights that calling the layer does not gather."""
    for name, parameter in head.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise UnsupportedModelError(
                f"{name} of the output layer is partitioned by ZeRO-3: use the model's logits, "
                "packed_cross_entropy(...), or ZeRO-2"
            )
    hooked = isinstance(head, FSDPModule) or head._forward_pre_hooks
    if isinstance(getattr(head, "weight", None), DTensor) and not hooked:
        raise UnsupportedModelError(
            "the output layer's weight is a DTensor that no forward gathers: pass the module that fully_shard or "
            "parallelize_module was called on, or use the model's logits, packed_cross_entropy(...)"
        )


def _called_with(head: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """``forward(*args)`` between the hooks of ``head``."""
    head.forward = forward
    try:
        return head(*args)
    finally:
        del head.forward


def _fused(head: Any, hidden: Tensor, targets: Tensor, weights: Tensor | None, tail: Tail) -> tuple[Tensor, Tensor]:
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    return linear_cross_entropy(
        hidden.to(dtype),
        head.weight.to(dtype),
        targets,
        bias=bias,
        weights=weights,
        scale=tail.scale,
        softcap=tail.softcap,
    )


def _chunked(
    head: nn.Module, hidden: Tensor, targets: Tensor, weights: Tensor | None, tail: Tail, rows: int
) -> tuple[Tensor, Tensor]:
    """The loss of ``rows`` tokens at a time, whose logits are recomputed in the backward."""
    parts = [
        [None] * -(-targets.numel() // rows) if x is None else x.flatten(0, 1)[None].split(rows, 1)
        for x in (hidden, targets, weights)
    ]
    sums = [checkpoint(_loss_of_logits, head, *part, tail, use_reentrant=False) for part in zip(*parts, strict=True)]
    loss_sum, weight_sum = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    return loss_sum, weight_sum


def _loss_of_logits(
    head: nn.Module, hidden: Tensor, targets: Tensor, weights: Tensor | None, tail: Tail
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    targets, weights = targets.to(logits.device), None if weights is None else weights.to(logits.device)
    return packed_cross_entropy(tail(logits), targets, weights=weights)
