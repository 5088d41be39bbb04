"""Finds the device of a model's computation, even if its weights are elsewhere between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def execution_device(model: nn.Module) -> torch.device:
    """The device of the first layer's computation.

    accelerate's offloading leaves parameters on the ``meta`` device and loads them in a hook, which knows the device.
    """
    placed = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
    if placed is not None:
        return placed
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):  # several hooks are kept in one
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("meta")
