"""Reads of a model what its collators need to know: its configurations, its router, and what it labels."""

from __future__ import annotations

from typing import Any

from torch import nn

ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")  # a config that has one may have a router with a loss


def configs_of(model: Any) -> list[Any]:
    """The configuration of a model inside any wrappers, or what is one, and the one of its text model."""
    while getattr(model, "config", None) is None and hasattr(model, "module"):
        model = model.module
    config: Any = model if hasattr(model, "get_text_config") else getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return [found for found in (config, text) if found is not None]


def has_router(model: Any) -> bool:
    """Returns whether the model routes tokens to experts, or may have an auxiliary loss: both leave padding out."""
    if any(hasattr(config, field) for config in configs_of(model) for field in ROUTER_LOSS):
        return True
    if not isinstance(model, nn.Module):
        return False
    from torch_backend.hf.anatomy.layers import find_experts

    return bool(find_experts(model))


def labels_every_token(model: Any) -> bool:
    """Returns whether the model classifies tokens; a collator may be used where transformers is not installed."""
    if not isinstance(model, nn.Module):
        return False
    from torch_backend.hf.anatomy.heads import trains_first_token

    return trains_first_token(model)


def labels_documents(model: Any) -> bool:
    """Returns whether a model classifies documents."""
    if not isinstance(model, nn.Module):
        return False
    from torch_backend.hf.anatomy import heads

    return heads.labels_documents(model)
