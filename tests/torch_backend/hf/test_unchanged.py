"""Tells a module that runs its library's code alone from others, so that tiles or kernels may compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from torch_backend.hf.anatomy.unchanged import why_changed


class Inherits(nn.Linear):
    """Another class with the forward of a library's; what that forward calls may differ."""


class Replaces(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked(kind: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, f"register_{kind}")(lambda *_: None)
    return module


def with_forward() -> nn.Module:
    module: Any = nn.Linear(2, 2)
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Inherits(2, 2), "its class Inherits is none of transformers, torch, peft"),
        (Replaces(2, 2), "its class Replaces is none of"),
        (weight_norm(nn.Linear(2, 2)), "its class ParametrizedLinear is none of"),
        (with_forward(), "somebody set a forward on it"),
        *((hooked(kind), "a hook stands on it") for kind in ("forward_hook", "forward_pre_hook")),
        *((hooked(kind), "a hook stands on it") for kind in ("full_backward_hook", "full_backward_pre_hook")),
    ],
)
def test_whoever_changes_a_module_is_named(module: nn.Module, reason: str) -> None:
    assert reason in (why_changed(module) or "")


def test_a_module_of_a_library_is_unchanged_until_a_hook_stands_on_all() -> None:
    module = nn.Linear(2, 2)
    assert why_changed(module) is None
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert why_changed(module) == "a hook stands on all modules"
    assert why_changed(module) is None
