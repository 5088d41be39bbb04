"""The loss of a transformers causal language model on a batch, without its logits.

batch -> the model's decoder -> hidden states -> :mod:`torch_backend.ops.linear_cross_entropy` with the weight
of its output layer. The scale and softcap that a model applies to its logits are read from its config. A run
on a few tokens, once per model, checks that it applies nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.patch import causal_lm
from torch_backend.losses.cross_entropy import next_token_targets
from torch_backend.ops.linear_cross_entropy import linear_cross_entropy

_checked: WeakSet[Any] = WeakSet()


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, Any], *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The summed next-token loss and the summed weight of its targets.

    Args:
        model: a transformers causal language model or what wraps one, patched if the batch is packed. Its decoder is
            called, so wrappers that need their own forward to be called (DDP, FSDP's root) are not for this function.
        batch: keyword arguments of the model, with ``labels`` int64 [B, S], unshifted.
        weights: [B, S] weight of the target that stands at the same place as the label's token; 1 if None.

    Returns:
        Two float32 scalars, to be divided once per step (:func:`torch_backend.losses.cross_entropy.normalise`).

    Raises:
        UnsupportedModelError: the model makes its logits in another way than from one linear layer, scale and softcap.
    """
    root = causal_lm(model)
    if root not in _checked and not torch.compiler.is_compiling():
        _check(root)
        _checked.add(root)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = root.get_decoder()(**inputs, use_cache=False).last_hidden_state
    head = root.get_output_embeddings()
    targets = next_token_targets(batch["labels"])
    if weights is not None:
        weights = nn.functional.pad(weights[:, 1:], (0, 1))
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    scale, softcap = _after_the_head(root.config)
    return linear_cross_entropy(
        hidden.to(dtype), head.weight.to(dtype), targets, bias=bias, weights=weights, scale=scale, softcap=softcap
    )


def _after_the_head(config: Any) -> tuple[float, float | None]:
    """Scale and softcap, which the known families give the output layer's values before the softmax."""
    scale = getattr(config, "logit_scale", None)  # Cohere
    if scale is None:
        scale = 1 / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    if multiplier := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
        scale = multiplier
    return float(scale), getattr(config, "final_logit_softcapping", None)


@torch.no_grad()
def _check(root: Any) -> None:
    head = root.get_output_embeddings()
    name = type(root).__name__
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{name} has no linear output layer: use its logits, packed_cross_entropy(...)")
    training = root.training
    root.eval()
    try:
        ids = torch.arange(4, device=head.weight.device)[None] + 1
        logits = root(input_ids=ids, use_cache=False).logits.float()
        values = head(root.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state).float()
    finally:
        root.train(training)
    scale, softcap = _after_the_head(root.config)
    values = values * scale
    if softcap:
        values = softcap * torch.tanh(values / softcap)
    tolerance = 8 * torch.finfo(head.weight.dtype).eps * float(logits.abs().max())
    if not torch.allclose(values, logits, rtol=0, atol=tolerance):
        raise UnsupportedModelError(
            f"{name} does more to its logits than a scale and a softcap: use its logits, packed_cross_entropy(...)"
        )
