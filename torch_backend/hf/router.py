"""The auxiliary loss of a router in packed batches: over the real tokens without padding, or refused.

transformers averages a router's statistics over the tokens that a 2-D ``attention_mask`` marks, or over all tokens if
there is none. It does so in the causal language model, outside of its decoder. So a packed batch with padding carries
this mask beside its boundaries. The model reads it for the auxiliary loss alone: the hook on the decoder replaces it
there. Layers that run on batches of documents are refused, because they also route the padding of these batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from packing_core.errors import LayoutError, UnsupportedModelError

SWITCH = "output_router_logits"


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


@contextmanager
def no_router_loss(model: nn.Module) -> Iterator[None]:
    """Inside, no config of the model asks for a router's loss."""
    configs = {id(c): c for module in model.modules() if getattr(c := getattr(module, "config", None), SWITCH, False)}
    try:
        for config in configs.values():
            setattr(config, SWITCH, False)
        yield
    finally:
        for config in configs.values():
            setattr(config, SWITCH, True)
