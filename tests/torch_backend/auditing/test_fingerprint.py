"""Verdicts of patch(model) hold for the code that ran: a class that is changed later is proved again."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import torch_backend
from packing_core.errors import ContaminationError
from tests.torch_backend.auditing.test_audit_mutants import previous
from tests.torch_backend.models import tiny
from torch_backend.auditing.fingerprint import fingerprint
from torch_backend.hf.patch import state_of

llama = import_module("transformers.models.llama.modeling_llama")


def leaking(own: Callable[..., Any], size: float = 0.1) -> Callable[..., Any]:
    """The method ``own`` of a module, and what stands at the token before in its result."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        return output + size * previous(output)

    return forward


def method_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.LlamaMLP, "forward", leaking(llama.LlamaMLP.forward))


def method_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", leaking(torch.nn.Linear.forward))


def function_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama.apply_rotary_pos_emb

    def rotation(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        q, k = own(q, k, *args, **kwargs)
        return q + 0.1 * torch.nn.functional.pad(q, (0, 0, 1, 0))[:, :, :-1], k

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", rotation)


def code_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Any) -> Any:
        return self.weight * (hidden_states + hidden_states.cumsum(-2) / 10)

    monkeypatch.setattr(llama.LlamaRMSNorm.forward, "__code__", forward.__code__)


CHANGES = [method_of_a_class, method_of_torch, code_in_place]


@pytest.mark.parametrize("again", [False, True], ids=["another model", "the patched model"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_class_that_is_changed_after_a_verdict_is_proved_again(
    change: Callable[[pytest.MonkeyPatch], None], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch_backend.patch(tiny("llama"))
    change(monkeypatch)
    if not again:
        model = tiny("llama")
    with pytest.raises(ContaminationError, match="LlamaForCausalLM"):
        torch_backend.patch(model)
    assert state_of(model) is None
    monkeypatch.undo()
    torch_backend.patch(model)


def test_every_change_of_the_code_gives_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    before = fingerprint(model, "auto")
    assert before == fingerprint(tiny("llama", seed=1), "auto") == fingerprint(torch_backend.patch(model), "auto")
    seen = {before, fingerprint(model, "sdpa"), fingerprint(tiny("llama").bfloat16(), "auto")}
    for change in (*CHANGES, function_of_the_file):
        with monkeypatch.context() as inside:
            change(inside)
            seen.add(fingerprint(model, "auto"))
        assert fingerprint(model, "auto") == before
    for size in (0.0, 0.2):  # the same code, which closes over another number
        with monkeypatch.context() as inside:
            inside.setattr(llama.LlamaMLP, "forward", leaking(llama.LlamaMLP.forward, size))
            seen.add(fingerprint(model, "auto"))
    assert len(seen) == 3 + len(CHANGES) + 3
