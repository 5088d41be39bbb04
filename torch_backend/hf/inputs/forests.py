"""Every rule about shared prefixes in a patched model: what computes a prefix once as it would for each document.

A model's anatomy -> :func:`why_no_forest`, before any batch. A batch with ``packed_parents`` -> :func:`check_forest`,
which also reads its arguments and whether dropout is on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packing_core.errors import UnsupportedModelError
from torch_backend.hf.anatomy.model import Anatomy
from torch_backend.hf.anatomy.random_draws import find_draw
from torch_backend.hf.inputs.arguments import HARMLESS
from torch_backend.hf.router import asks_for_router_loss
from torch_backend.ops.attention import runs_parents

WAY_OUT = "pack without shared prefixes (share_prefix=False)"
OVER_RANKS = "the documents of its batches are cut over ranks (mesh)"
ROUTER_LOSS = "its router's auxiliary loss would count a shared token once"
TAKES_PARENTS = "takes_parents"  # marks a loss function that knows which token predicts the first one of a segment


def why_no_forest(anatomy: Anatomy) -> str | None:
    """Explains why a model cannot run shared prefixes exactly, whatever the batch; None if it can."""
    if anatomy.head != "next token":
        return "its head is not that of a language model"
    if anatomy.route == "documents":
        return f"it runs on batches of documents ({anatomy.why})"
    if anatomy.rotaries:
        return "its rotary frequencies depend on the length of each document"
    if anatomy.numbering is not None:
        return "it numbers the tokens of each document itself"
    if getattr(anatomy.decoder.config, "attention_chunk_size", None):
        return "its attention sees chunks, which are counted from the beginning of a document"
    if anatomy.indexers:
        return "its indexers select the keys of whole documents"
    return None


def why_no_attention(device: torch.device, implementation: str | Sequence[str]) -> str | None:
    """Explains why attention by what a model was patched with runs no shared prefixes; None if it does."""
    if runs_parents(device, implementation):
        return None
    names = implementation if isinstance(implementation, str) else ", ".join(implementation)
    return f"attention by {names} has no segments that continue others"


def check_forest(anatomy: Anatomy, kwargs: Mapping[str, Any], *, compiled: str | None) -> None:
    """Refuse a batch with parents that would not be exact.

    Args:
        anatomy: of the model that is called.
        kwargs: all its arguments.
        compiled: why its layers, which are compiled, cannot run shared prefixes; None if they can or are not.

    Raises:
        UnsupportedModelError: names the reason and the way out.
    """
    root = anatomy.root
    refuse(root, why_not_this_call(anatomy, kwargs))
    if compiled is not None:
        refuse(root, f"its layers are compiled (pass compile=False), and {compiled}")
    if kwargs.get("shift_labels") is not None:
        refuse(root, "the batch came with shift_labels, which have one place for all that follows a prefix")
    if kwargs.get("labels") is not None and not getattr(getattr(root, "loss_function", None), TAKES_PARENTS, False):
        refuse(
            root,
            "its own loss predicts every token from the one before it in the row: compute the loss by "
            "crosspack.make_train_step, causal_lm_loss or token_logprobs, or call the model without labels",
        )


def why_not_this_call(anatomy: Anatomy, kwargs: Mapping[str, Any]) -> str | None:
    """Explains why a call of a model, as it is set up now, cannot share prefixes; None if it can."""
    if (reason := why_no_forest(anatomy)) is not None:
        return reason
    if (draw := find_draw(anatomy.root)) is not None:
        return f"{draw} is on, and documents that share a prefix would share what it draws"
    return why_not_these(anatomy.root, kwargs)


def refuse(root: Any, reason: str | None) -> None:
    """Raise UnsupportedModelError if there is a reason why a model cannot run shared prefixes."""
    if reason is not None:
        raise UnsupportedModelError(f"{type(root).__name__} cannot run shared prefixes: {reason}; {WAY_OUT}")


def why_not_these(root: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Explains why the arguments of a call, whatever the model, cannot share prefixes; None if they can."""
    if asks_for_router_loss(root, kwargs):
        return ROUTER_LOSS
    tensors = sorted(name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in HARMLESS)
    if tensors:
        return f"the batch came with {tensors[0]}"
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim != 2:
        return "the batch came with positions on several axes"
    return None


def why_not_in_training(root: nn.Module) -> str | None:
    """Explains why a model cannot train with shared prefixes as it is set up; None if it can."""
    if (draw := find_draw(root, ever=True)) is not None:
        return f"{draw} may be on in training, and documents that share a prefix would share what it draws"
    return ROUTER_LOSS if asks_for_router_loss(root, {}) else None
