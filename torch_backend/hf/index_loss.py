"""The loss that trains the indexers of a model, in packed forwards whose config has an ``index_loss_coef``.

The indexer of a layer leaves what its scores are made of in the :class:`PackedForward`, where the attention of the same
layer takes it and leaves the loss of each document (:mod:`torch_backend.ops.attention.index_loss`). The model's output
has their mean over documents, added up over layers, and its loss that times the coefficient.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from packing_core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch_backend.hf.anatomy.model import Anatomy
    from torch_backend.hf.forward import PackedForward

COEFFICIENT = "index_loss_coef"


def index_coefficient(root: Any) -> float:
    """Returns what the loss of a model's indexers is multiplied by in its own loss; 0 if it has none."""
    configs = root.config, root.config.get_text_config()
    return float(next((value for each in configs if (value := getattr(each, COEFFICIENT, None))), 0.0))


def trains_indexers(anatomy: Anatomy) -> bool:
    """Returns whether packed forwards of a model compute the loss of its indexers.

    Raises:
        UnsupportedModelError: its config asks for it, and it has no indexers, or they choose blocks.
    """
    if not index_coefficient(anatomy.root):
        return False
    if not all(hasattr(indexer, "index_topk") for indexer in anatomy.indexers) or not anatomy.indexers:
        lacks = "whose indexers choose blocks of keys" if anatomy.indexers else "which has no indexers"
        raise UnsupportedModelError(
            f"config.{COEFFICIENT} asks {type(anatomy.root).__name__}, {lacks}, for the loss by which indexers learn "
            "which keys to choose: leave it out"
        )
    return True


def with_index_loss(root: Any, forward: PackedForward, output: Any) -> Any:
    """Returns the output of a model with the loss of its indexers, if the forward computed it.

    Raises:
        UnsupportedModelError: the model returns no mapping; or its layers run without gradients at first.
    """
    if forward.index_losses is None:
        return output
    losses, forward.index_losses = list(forward.index_losses.values()), {}
    if not isinstance(output, MutableMapping):
        raise UnsupportedModelError(f"{type(root).__name__} returns a tuple, which holds no index_loss: return a dict")
    loss = torch.stack([each.mean().to(losses[0].device) for each in losses]).sum()
    trained = any(p.requires_grad for name, p in root.named_parameters() if ".indexer." in name)
    if torch.is_grad_enabled() and trained and not loss.requires_grad:
        raise UnsupportedModelError(
            "indexers get no gradients under reentrant gradient checkpointing: "
            'gradient_checkpointing_enable({"use_reentrant": False})'
        )
    if output.get("loss") is not None:
        output["loss"] = output["loss"] + index_coefficient(root) * loss.to(output["loss"].device)
    output["index_loss"] = loss
    return output
