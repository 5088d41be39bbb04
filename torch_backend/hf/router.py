"""The auxiliary loss of a router in packed batches: over the real tokens without padding, or refused.

transformers averages a router's statistics over the tokens that a 2-D ``attention_mask`` marks, or over all tokens if
there is none. It does so in the causal language model, outside of its decoder. So a packed batch with padding carries
this mask beside its boundaries. The model reads it for the auxiliary loss alone: the hook on the decoder replaces it
there. Layers that run on batches of documents are refused, because they also route the padding of these batches.

Where documents are cut over ranks, the function of the modeling file that computes the loss sees the tokens of one
rank. The model's forward then calls :func:`~torch_backend.context_parallel.router_loss.balancing_loss` in its place, if
the two agree on random numbers.

Where ``config.router_loss`` is "document", a packed forward has the loss of each document in place of that of all
tokens, or beside none, from the router logits in the output of its decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError, UnsupportedModelError
from torch_backend.context_parallel.router_loss import balancing_loss, document_balance
from torch_backend.context_parallel.share import RankShare
from torch_backend.hf.anatomy.structure import with_values
from torch_backend.hf.entry import current_forward
from torch_backend.hf.forward import PackedForward
from torch_backend.hf.index_loss import COEFFICIENT as COEFFICIENT_OF_INDEXERS
from torch_backend.hf.override import OUTER, called, has_own_forward, names, original_class, rebound
from torch_backend.segments import to_device

SWITCH = "output_router_logits"
KIND = "router_loss"  # of a config: "document" or, as without it, "batch"
BIAS = "e_score_correction_bias"  # by which routers of DeepSeek-V3's kind choose, and no others
COEFFICIENT = "router_aux_loss_coef"
FUNCTION = "load_balancing_loss_func"
TRLS_LOSS = "fused_lm_head"  # argument of the forward that TRL's trainers set on a model


def asks_for_router_loss(root: Any, batch: Mapping[str, Any]) -> bool:
    """Returns whether a forward on ``batch`` computes the auxiliary loss, by its argument or the model's config."""
    if batch.get(SWITCH) is not None:
        return bool(batch[SWITCH])
    return any(getattr(config, SWITCH, False) for config in (root.config, root.config.get_text_config()))


def refuse_per_document(root: Any, layers: Iterable[nn.Module], batch: Mapping[str, Any]) -> None:
    """Raise if a router's loss is wanted and a router is inside ``layers``, which run on batches of documents."""
    if not asks_for_router_loss(root, batch):
        return
    routers = _router_classes(root)
    if any(isinstance(module, routers) for layer in layers for module in layer.modules()):
        raise UnsupportedModelError(
            f"{type(root).__name__} routes inside layers that run per document, so its router loss would "
            f"count padding: set {SWITCH}=False"
        )


def require_mask(root: Any, batch: Mapping[str, Any]) -> None:
    """Raise if a packed batch computes a router's loss and nothing says which of its tokens are padding."""
    if batch.get("attention_mask") is None and asks_for_router_loss(root, batch):
        raise LayoutError(
            f"{type(root).__name__} computes a router's auxiliary loss ({SWITCH}), which would count padding, because "
            "the packed batch has no attention_mask: use PackedCollator(model) or with_boundaries(collator, model), "
            "which add it"
        )


def _router_classes(root: nn.Module) -> tuple[type, ...]:
    """The modules whose outputs transformers records as ``router_logits``."""
    classes: list[type] = []
    for module in root.modules():
        recorded: Any = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders: list[Any] = recorded if isinstance(recorded, list) else [recorded]
        classes += [getattr(recorder, "target_class", recorder) for recorder in recorders]
    return tuple(classes)


def no_router_loss(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, no config of the model asks for the loss of a router or of indexers."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    switches = [(config, name) for config in configs.values() for name in (SWITCH, COEFFICIENT_OF_INDEXERS)]
    return with_values((config, name, False) for config, name in switches if getattr(config, name, False))


def with_any_token(root: Any, batch: dict[str, Any], share: RankShare | None) -> tuple[dict[str, Any], Tensor | None]:
    """Returns arguments whose mask marks all tokens of a batch of padding alone, and whether the batch is none such.

    Such batches fill up the last step of an epoch. The loss of a router is a mean over the tokens that the mask marks,
    which of none is 0 / 0; :func:`without_padding_alone` leaves it out of the output. None for a bool tensor [] where
    the mask stays: it is not there, the loss is not wanted, or the output would be a tuple.
    """
    mask, as_tuple = batch.get("attention_mask"), batch.get("return_dict", root.config.return_dict) is False
    if mask is None or share is not None or as_tuple or not asks_for_router_loss(root, batch):
        return batch, None
    real = mask.any()
    return {**batch, "attention_mask": torch.where(real, mask, torch.ones_like(mask))}, real


def without_padding_alone(root: Any, output: Any, real: Tensor | None) -> Any:
    """Returns the output of a model without the router's loss of a batch that is not ``real``."""
    if real is None or not isinstance(output, MutableMapping) or output.get("aux_loss") is None:
        return output
    of_padding = torch.where(real.to(output["aux_loss"].device), 0, output["aux_loss"])
    if output.get("loss") is not None:
        output["loss"] = output["loss"] - (coefficient_of(root) or 0.0) * of_padding.to(output["loss"].device)
    output["aux_loss"] = output["aux_loss"] - of_padding
    return output


# -- per document --------------------------------------------------------------------------------------------------


def balances_documents(root: Any) -> bool:
    """Returns whether the loss of a router is that of each document, by the model's config.

    Raises:
        UnsupportedModelError: the config names another loss.
    """
    kinds = {getattr(config, KIND, None) for config in (root.config, root.config.get_text_config())} - {None}
    if not kinds <= {"batch", "document"}:
        raise UnsupportedModelError(f'config.{KIND} is "batch" or "document", got {", ".join(map(repr, kinds))}')
    return "document" in kinds


def with_document_loss(root: Any, forward: PackedForward, batch: Mapping[str, Any], output: Any) -> Any:
    """Returns the output of a model with the loss of its routers per document, if its config and the batch ask for it.

    Args:
        root: the model.
        forward: its call, with the logits of the routers.
        batch: the arguments of the call.
        output: of the model; its loss may have another router's loss in it.

    Raises:
        UnsupportedModelError: the model does not say what its routers compute or choose, or what the loss is times.
    """
    if not (asks_for_router_loss(root, batch) and balances_documents(root)):
        return output
    chosen, factor = _setting(root, "num_experts_per_tok"), coefficient_of(root)
    logits = [x.flatten(0, -2).float() for x in forward.router_logits or () if x is not None]
    routers: Any = _router_classes(root)
    codes = set().union(*(names(router.forward) for router in routers))
    scored = FUNCTION in called(original_class(root).forward) or (BIAS in codes and "softmax" not in codes)
    if not (scored and logits and isinstance(output, MutableMapping) and chosen and factor is not None):
        raise UnsupportedModelError(
            f"{type(root).__name__} has no router_logits of a known kind, num_experts_per_tok or {COEFFICIENT}, so its "
            f'router has no loss per document: set config.{COEFFICIENT}, or leave config.{KIND} = "document" out'
        )
    scores = [x.sigmoid() if "sigmoid" in codes else x.softmax(-1) for x in logits]
    share, group = forward.part, None
    if share is None:
        segments, count = forward.segments.seq_idx, len(forward.segments.cu_seqlens) - 1
    else:
        of_tokens = np.repeat(share.plan.document[share.pieces], share.lengths)
        segments, count = to_device(torch.from_numpy(of_tokens), share.device), len(share.plan.lengths)
        group = share.group
    mask = batch.get("attention_mask")
    loss = document_balance(scores, segments, count, chosen, mask, group=group) / forward.added_up
    if output.get("loss") is not None:
        added = loss - output.get("aux_loss", 0)
        output["loss"] = output["loss"] + factor * added.to(output["loss"].device)
    output["aux_loss"] = loss
    return output


def coefficient_of(root: Any) -> float | None:
    """Returns what the loss of a model's router is multiplied by in its own loss; None if it does not say."""
    own: float | None = _setting(root, "aux_loss_coef")  # JetMoE's name
    return _setting(root, COEFFICIENT) if own is None else own


def _setting(root: Any, name: str) -> Any:
    return getattr(root, name, getattr(root.config.get_text_config(), name, None))


# -- over ranks ----------------------------------------------------------------------------------------------------


def why_not_over_ranks(root: nn.Module) -> str | None:
    """Explains why a router's loss is not computed over ranks; None if it is."""
    if balances_documents(root):
        return None
    if has_own_forward(root) and not _is_of_trl(root):
        return "somebody set a forward on this instance"
    found = _forward_over_ranks(original_class(root).forward)
    return found if isinstance(found, str) else None


def _is_of_trl(root: nn.Module) -> bool:
    """Returns whether a model's own forward is TRL's, which without :data:`TRLS_LOSS` is that of the modeling file."""
    own: Any = root.__dict__.get(OUTER, root.__dict__.get("forward"))
    function = getattr(own, "__func__", None)
    if not isinstance(function, FunctionType) or TRLS_LOSS not in function.__code__.co_varnames:
        return False
    return str(function.__globals__.get("__name__")).startswith("trl.")  # __module__ is that of the wrapped forward


def over_ranks(
    root: nn.Module, call: Callable[..., Any], share: RankShare | None, batch: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns the model's forward with a router's loss over ranks, where the batch asks for one and is cut.

    Args:
        root: the model, of which :func:`why_not_over_ranks` is None where it computes such a loss over ranks.
        call: its own forward.
        share: what the rank holds of the batch; None for all of it.
        batch: the arguments.
    """
    if share is None or not asks_for_router_loss(root, batch):
        return call
    forward = _forward_over_ranks(original_class(root).forward)
    if isinstance(forward, str):
        return call
    if batch.get(TRLS_LOSS):
        raise UnsupportedModelError(
            f"TRL's own loss ({TRLS_LOSS}=True) computes the loss of a router on the tokens of one rank: leave it out, "
            f"or set {SWITCH}=False"
        )
    return partial(forward, root)


def _of_all_ranks(gate_logits: Any, experts: int, top_k: int = 2, attention_mask: Tensor | None = None) -> Tensor:
    """Replaces ``load_balancing_loss_func``."""
    forward = current_forward()
    assert forward is not None and forward.part is not None
    return balancing_loss(gate_logits, experts, top_k, attention_mask, group=forward.part.group) / forward.added_up


@cache
def _forward_over_ranks(forward: Callable[..., Any]) -> Callable[..., Any] | str:
    """``forward`` with the loss over ranks, or the reason why there is none."""
    function = called(forward).get(FUNCTION)
    if function is None:
        return f"it does not call {FUNCTION}"
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(9, 4, generator=generator) for _ in range(2))
    other = f"its {FUNCTION} is another one than that of Mixtral"
    for mask in (None, torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]])):
        try:
            theirs = function(logits, 4, 2, mask)
        except Exception:  # whatever a function does that reads other logits
            return other
        if not torch.allclose(torch.as_tensor(theirs), balancing_loss(logits, 4, 2, mask), rtol=1e-5):
            return other
    return rebound(forward, {FUNCTION: _of_all_ranks}) or "a decorator hides its forward"
