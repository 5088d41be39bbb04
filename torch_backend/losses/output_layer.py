"""Cross-entropy and log-probabilities of an output layer applied to hidden states, without all of its logits.

A plain linear layer: its weight and bias go into :mod:`torch_backend.ops.linear_cross_entropy` or
:mod:`torch_backend.ops.linear_logprobs`. Any other module (LoRA
adapters, quantised weights, tensor parallelism, forward hooks): the module itself is called on a chunk of the hidden
states at a time, in the forward and again in the backward. So the loss contains whatever the layer does. The divergence
of two models takes linear layers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from packing_core.errors import UnsupportedModelError
from torch_backend.losses.cross_entropy import packed_cross_entropy
from torch_backend.ops.linear_cross_entropy import linear_cross_entropy
from torch_backend.ops.linear_divergence import LinearLogits, linear_divergence
from torch_backend.ops.linear_logprobs import linear_logprobs

CHUNK_BYTES = 2**30  # float32 logits of one chunk
_SHARDED = FSDPModule, FullyShardedDataParallel


# The names by which configs of the known families keep the scale and softcap of their logits.
MULTIPLIED_BY, DIVIDED_BY = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
CAPPED_AT = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class Tail:
    """Operations after the output layer: ``scale``, then ``softcap * tanh(logits / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def candidates(cls, config: Any) -> list[Tail]:
        """Lists a config's possible tails. Names do not decide: some families scale hidden states instead."""

        def values(names: tuple[str, ...]) -> list[float]:
            found = (getattr(part, name, None) for part in (config, config.get_text_config()) for name in names)
            return [float(value) for value in found if value]

        scales = [1.0, *values(MULTIPLIED_BY), *(1 / value for value in values(DIVIDED_BY))]
        return [cls(scale, softcap) for scale in scales for softcap in (None, *values(CAPPED_AT))]

    def at_temperature(self, temperature: float) -> Tail:
        """This, and the division of its result by ``temperature``."""
        return Tail(self.scale / temperature, self.softcap and self.softcap / temperature)

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
            x, weight, bias = _operands(head, hidden)
            options: dict[str, Any] = {"scale": tail.scale, "softcap": tail.softcap}
            return linear_cross_entropy(x, weight, targets, bias=bias, weights=weights, **options)

        return _between_hooks(head, fused, hidden)

    def of_logits(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return packed_cross_entropy(tail(logits), targets, weights=weights)

    others = (targets,) if weights is None else (targets, weights)
    again = not isinstance(head, _SHARDED)
    loss_sum, weight_sum = _by_chunks(head, of_logits, hidden, *others, logit_bytes=4 * entries, again=again)
    return loss_sum.sum(), weight_sum.sum()


def output_layer_logprobs(
    head: nn.Module, hidden: Tensor, ids: Tensor, *, tail: Tail, entries: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``ids`` under ``tail(head(hidden))``, and the entropy of these distributions.

    Args:
        head, hidden, tail, entries: as for :func:`output_layer_loss`.
        ids: int64 [B, S, K]; where the first one is negative, nothing is computed.
        entropy: whether it is wanted.

    Returns:
        [B, S, K] and [B, S], float32 at least; zeros where nothing is computed.

    Raises:
        UnsupportedModelError: as :func:`output_layer_loss` does.
    """
    _refuse_scattered(head)
    if _is_linear(head):

        def fused(hidden: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, bias = _operands(head, hidden.flatten(0, 1))
            options: dict[str, Any] = {"scale": tail.scale, "softcap": tail.softcap, "entropy": entropy}
            found = linear_logprobs(x, weight, ids.flatten(0, 1), bias=bias, **options)
            return found[0].view(ids.shape), found[1].view(ids.shape[:2])

        return _between_hooks(head, fused, hidden)

    def of_logits(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        log_p = tail(logits.to(torch.promote_types(logits.dtype, torch.float32))).log_softmax(-1)
        left_out = ids[..., 0] < 0
        at_ids = log_p.gather(-1, ids.clamp(min=0)).masked_fill(left_out[..., None], 0)
        entropies = -(log_p.exp() * log_p).sum(-1) if entropy else log_p.new_zeros(left_out.shape)
        return at_ids, entropies.masked_fill(left_out, 0)

    # several tensors as large as the logits live at a time
    logprobs, entropies = _by_chunks(head, of_logits, hidden, ids, logit_bytes=32 * entries)
    return logprobs.view(ids.shape), entropies.view(ids.shape[:2])


def linear_logits(head: nn.Module, hidden: Tensor, tail: Tail) -> LinearLogits:
    """Returns the logits ``tail(head(hidden))`` of [B, S, D], not made yet.

    Raises:
        UnsupportedModelError: the layer is not a plain linear one, or its weight is partitioned.
    """
    _refuse_scattered(head)
    if not _is_linear(head) or isinstance(head.weight, DTensor):
        raise UnsupportedModelError(
            f"an output layer ({type(head).__name__}) is not plainly linear with a whole weight, and distillation over "
            "a vocabulary reads both weights: distil by top_k, token_logprobs(..., candidates=...)"
        )
    return _unmade(head, hidden, tail)


def _unmade(head: nn.Module, hidden: Tensor, tail: Tail) -> LinearLogits:
    return LinearLogits(*_operands(head, hidden.flatten(0, 1)), tail.scale, tail.softcap)


def output_layer_divergence(
    head: nn.Module, hidden: Tensor, tail: Tail, teacher: LinearLogits, *, beta: float
) -> tuple[Tensor, Tensor]:
    """:func:`torch_backend.ops.linear_divergence.linear_divergence` of ``tail(head(hidden))``: [B * S] and [B * S]."""
    if not (isinstance(head, FSDPModule) and _is_linear(head)):
        return linear_divergence(linear_logits(head, hidden, tail), teacher, beta=beta)
    pair: tuple[Tensor, Tensor] = _between_hooks(
        head, lambda hidden: linear_divergence(_unmade(head, hidden, tail), teacher, beta=beta), hidden
    )
    return pair


@torch.no_grad()
def most_likely(head: nn.Module, hidden: Tensor, k: int, *, entries: int) -> Tensor:
    """int64 [B, S, k]: the ids of the largest logits, largest first; a scale above 0 and a softcap keep their order."""
    _refuse_scattered(head)
    (ids,) = _by_chunks(head, lambda logits: (logits.topk(k).indices,), hidden, logit_bytes=8 * entries)
    return ids.view(*hidden.shape[:2], k)


def _is_linear(head: nn.Module) -> bool:
    """Returns whether the module computes ``x @ weight.T + bias`` and nothing besides."""
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
    """Returns whether the weight is a tensor subclass (quantised, distributed)."""
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


def _between_hooks(head: nn.Module, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """``forward(hidden)``; between FSDP2's hooks, which gather the weight and watch the result for the backward."""
    if not isinstance(head, FSDPModule):
        return forward(hidden)
    head.forward = forward
    try:
        return head(hidden)
    finally:
        del head.forward


def _by_chunks(
    head: nn.Module,
    of_logits: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor,
    *others: Tensor,
    logit_bytes: int,
    again: bool = True,
) -> list[Tensor]:
    """The results [1, N, ...] of ``of_logits`` on some tokens at a time.

    Args:
        of_logits: (logits, ``others``), of [1, n, ...] each -> [1, n, ...] or scalars, which are stacked.
        hidden, others: [B, S, ...].
        logit_bytes: of a token.
        again: makes the logits again in the backward instead of keeping them.
    """
    rows = max(1, CHUNK_BYTES // logit_bytes)
    if isinstance(head, _SHARDED):  # which communicates in calls: as many on every rank
        rows = hidden.shape[0] * hidden.shape[1]

    def of_part(hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        logits = head(hidden)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return of_logits(logits, *(x.to(logits.device) for x in others))

    parts = zip(*(x.flatten(0, 1)[None].split(rows, 1) for x in (hidden, *others)), strict=True)
    run = partial(checkpoint, of_part, use_reentrant=False) if again else of_part
    results = zip(*(run(*part) for part in parts), strict=True)
    return [torch.cat(column, 1) if column[0].ndim else torch.stack(column) for column in results]


def _operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the dtype that the layer would compute in."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    return hidden.to(dtype), head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
