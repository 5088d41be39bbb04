"""Experts that were changed, before the patch or after it, compute in packed calls what they compute without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import torch_backend
from tests.torch_backend.hf.test_packed_experts import LENGTHS, adapted
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny, with_mask
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.hf.edits.packed_experts import reasons_against


def set_on(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


def tanh_gate(self: Any, z: torch.Tensor) -> torch.Tensor:
    gate, up = z.chunk(2, dim=-1)
    return gate.tanh() * up


def scales(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


def scaled_forward(module: Any) -> None:
    own = type(module).forward
    module.forward = MethodType(lambda self, *args, **kwargs: 2 * own(self, *args, **kwargs), module)


CHANGES = {
    "a limit": ("gpt_oss", set_on("limit", 0.05)),
    "an alpha": ("gpt_oss", set_on("alpha", 0.3)),
    "an activation": ("qwen3_moe", set_on("act_fn", nn.Tanh())),
    "a gate": ("qwen3_moe", lambda module: setattr(module, "_apply_gate", MethodType(tanh_gate, module))),
    "a hook": ("qwen3_moe", lambda module: module.register_forward_hook(scales)),
    "a hook on the activation": ("qwen3_moe", lambda module: module.act_fn.register_forward_hook(scales)),
    "a forward": ("qwen3_moe", scaled_forward),
}
# afterwards patched models refuse hooks and forwards, whatever experts run on
AFTER = ("a limit", "an alpha", "an activation", "a gate")
CASES = [(change, False) for change in CHANGES] + [(change, True) for change in AFTER]


@pytest.mark.parametrize("with_adapters", [False, True], ids=["weights", "target_parameters"])
@pytest.mark.parametrize(("change", "after"), CASES, ids=[f"{c}, {'after' if a else 'before'}" for c, a in CASES])
def test_packed_calls_compute_what_experts_do_now(change: str, after: bool, with_adapters: bool) -> None:
    family, apply = CHANGES[change]
    docs, batch = documents(LENGTHS), with_mask(collate(documents(LENGTHS), capacity=16))
    models = [adapted(family) if with_adapters else tiny(family) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    unchanged = alone(copy.deepcopy(models[0]), docs)
    if after:
        torch_backend.patch(models[1], verify=False)
    for model in models:
        for module in find_experts(model).values():
            apply(module)
    if not after:
        torch_backend.patch(models[1], verify=False)
    want = alone(models[0], docs)
    assert not torch.allclose(want.loss, unchanged.loss, rtol=1e-6)
    assert_same(packed(models[1], docs, batch), want, 2e-5)


def test_hooks_that_watch_experts_inside_adapters_are_called() -> None:
    model, seen = adapted("qwen3_moe"), list[torch.Size]()
    for module in find_experts(model).values():
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch_backend.patch(model, verify=False)
    with torch.no_grad():
        model(**with_mask(collate(documents(LENGTHS), capacity=16)))
    assert seen == [torch.Size((16, model.config.hidden_size))] * len(find_experts(model))


def test_experts_with_a_forward_of_their_own_keep_it_and_say_why() -> None:
    models = [tiny("qwen3_moe") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for module in find_experts(model).values():
            kind = type(module)

            def forward(self: Any, *args: Any, kind: Any = kind) -> Any:
                return 2 * kind.forward(self, *args)

            module.__class__ = type("Doubled", (kind,), {"forward": forward})
    docs = documents(LENGTHS)
    want = alone(models[0], docs)
    torch_backend.patch(models[1], verify=False)
    assert set(reasons_against(models[1].model).values()) == {
        "Doubled has another forward than the one that transformers hands to implementations"
    }
    assert_same(packed(models[1], docs, with_mask(collate(docs, capacity=16))), want, 2e-5)


def test_experts_by_name_read_their_settings_in_every_call() -> None:
    docs = documents(LENGTHS)
    model = tiny("gpt_oss")
    model.set_experts_implementation("crosspack")
    alone(model, docs)
    for module in find_experts(model).values():
        module.limit = 0.05
    found = alone(model, docs)
    model.set_experts_implementation("eager")
    assert_same(found, alone(model, docs), 2e-5)
