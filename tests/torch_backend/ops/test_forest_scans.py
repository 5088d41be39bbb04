"""Scans and convolutions of segments that continue others: each goes on from where its parent ended, and no further."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_backend
from tests.torch_backend.collate.test_shared_prefixes import answers, loss_and_gradients
from tests.torch_backend.kernels import ONE_DTYPE, Where, assert_within_budget, interpret, numpy
from tests.torch_backend.models import error, patched, tiny
from torch_backend import PackedCollator
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.ops.conv import short_convolution
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.ops.scan.kimi_delta.operators import kimi_delta_rule
from torch_backend.ops.scan.selective import operators as selective
from torch_backend.segments import PackedMetadata

# a prompt of 35, which is longer than a chunk, with an answer of 5 and a turn of 2; two answers to that, of 1 and 9; a
# document of 3 with an answer of 4
LENGTHS, PARENTS = (35, 5, 2, 3, 1, 9, 4), (-1, 0, 0, -1, 2, 2, 3)
TOKENS = sum(LENGTHS)
STARTS = np.cumsum([0, *LENGTHS])
BEFORE = [  # of each token in its document, -1 for none
    start + i - 1 if i else (STARTS[parent + 1] - 1 if parent >= 0 else -1)
    for start, length, parent in zip(STARTS, LENGTHS, PARENTS, strict=False)
    for i in range(length)
]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(selective, "_L", 8)


def forest(where: Where) -> PackedMetadata:
    return PackedMetadata.from_lengths(LENGTHS, device=where.device, parents=PARENTS)


def walk(step: Callable[..., tuple[Tensor, Tensor]], zero: Tensor, *inputs: Tensor | None) -> Tensor:
    """The recurrence from token to token along every document; ``step(state, *inputs of a token)``."""
    states, out = {-1: zero}, []
    for t, before in enumerate(BEFORE):
        states[t], y = step(states[before], *(None if x is None else x[t] for x in inputs))
        out.append(y)
    return torch.stack(out)


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Any:
    state = state * g.exp().reshape(len(state), -1, 1)
    new = v if beta is None else (v - (state * k[..., None]).sum(1)) * beta[:, None]
    state = state + k[..., None] * new[:, None]
    return state, (state * q[..., None]).sum(1) * q.shape[1] ** -0.5


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    return walk(delta_step, q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), q, k, v, g, beta)


def diagonal(u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    def step(state: Tensor, u: Tensor, g: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state = state * (g[:, None] * A).exp() + u[:, None] * b
        return state, (state * c).sum(1)

    return walk(step, torch.zeros_like(A), u, g, B, C)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A token's window, its own place last, is what is before it."""
    window = torch.zeros(weight.shape[1], x.shape[1], dtype=x.dtype)

    def step(window: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([window[1:], token[None]])
        return window, F.silu(bias + (window * weight.T).sum(0))

    return walk(step, window, x)


def drawn(where: Where, name: str) -> list[Tensor]:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(TOKENS, *shape, generator=torch.Generator().manual_seed(3)).to(where.device, where.dtype)

    if name == "convolution":
        return [where.draw(TOKENS, 3), where.draw(3, 4, seed=1), where.draw(3, seed=2)]
    if name == "diagonal":
        rates = -1 - torch.arange(6.0).view(3, 2).to(where.device, where.dtype) / 6
        return [where.draw(TOKENS, 3), uniform(3), rates, *(where.draw(TOKENS, 2, seed=n) for n in (1, 2))]
    q, k = (F.normalize(where.draw(TOKENS, 2, 16, seed=n), dim=-1) for n in (1, 2))
    v, g, beta = where.draw(TOKENS, 2, 16, seed=5), -0.2 * uniform(2), torch.sigmoid(where.draw(TOKENS, 2, seed=4))
    return {"linear": [q, k, v, g], "delta": [q, k, v, g, beta], "kimi": [q, k, v, -0.2 * uniform(2, 16), beta]}[name]


def of_kernels(name: str, packed: PackedMetadata, inputs: list[Tensor]) -> Tensor:
    if name == "convolution":
        x, weight, bias = inputs
        return short_convolution(x, weight, packed, bias=bias, silu=True)
    if name == "linear":
        return gated_delta_rule(*inputs, None, packed)
    rules = {"delta": gated_delta_rule, "kimi": kimi_delta_rule, "diagonal": selective.diagonal_scan}
    return rules[name](*inputs, packed)


ORACLES = {"convolution": convolution, "linear": delta, "delta": delta, "kimi": delta, "diagonal": diagonal}
# Interpreted, two of them take many times as long as the others, and tests that run a scan several times leave them to
# `make test-all`.
LONG = ("kimi", "diagonal")
REPEATED = [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in ORACLES]


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", ORACLES)
def test_forward_and_backward_are_the_recurrence_along_every_document(where, name):
    inputs = [x.detach().requires_grad_() for x in drawn(where, name)]

    def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
        out = function(*inputs)
        dout = where.draw(*out.shape, seed=6).to(out)
        gradients = torch.autograd.grad(out, inputs, dout)
        return {"out": out, **{str(n): gradient for n, gradient in enumerate(gradients)}}

    def of_oracle(dtype: torch.dtype) -> dict[str, np.ndarray]:
        given = [x.detach().cpu().to(dtype).requires_grad_() for x in inputs]
        return {key: numpy(x) for key, x in results(ORACLES[name], given).items()}

    found = results(lambda *given: of_kernels(name, forest(where), list(given)), inputs)
    assert_within_budget(found, of_oracle(torch.float64), of_oracle(where.dtype), where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("name", REPEATED)
def test_no_segment_moves_another_that_it_does_not_lead_to_by_a_bit(where, name):
    inputs = drawn(where, name)
    before = of_kernels(name, forest(where), inputs)
    for segments in ((1, 3), (2,)):
        first = inputs[0].clone()
        for segment in segments:
            first[STARTS[segment] : STARTS[segment + 1]] = float("nan")
        after = of_kernels(name, forest(where), [first, *inputs[1:]])
        below = {*segments} | {s for s, parent in enumerate(PARENTS) if parent in segments}
        if name in ("linear", "delta", "kimi"):
            below = {*segments}  # a query of a segment leaves the state alone
        for other in range(len(LENGTHS)):
            part = slice(STARTS[other], STARTS[other + 1])
            assert torch.equal(after[part], before[part]) == (other not in below), (segments, other)


@pytest.mark.parametrize("where", ONE_DTYPE[1:], indirect=True)  # an interpreter runs programs in one order
@pytest.mark.parametrize("name", ORACLES)
def test_gradients_repeat_to_the_bit(where, name):
    inputs = [x.detach().requires_grad_() for x in drawn(where, name)]
    once, again = (
        torch.autograd.grad(of_kernels(name, forest(where), inputs).float().square().sum(), inputs) for _ in range(2)
    )
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)


FAMILIES = {
    "qwen3_5_text": {},
    "bamba": {},
    "falcon_h1": {},
    "lfm2": {},
    "minimax": {},
    "recurrent_gemma": {"num_hidden_layers": 1},
    "falcon_mamba": {"state_size": 2, "num_hidden_layers": 1},
}
SLOW = ("recurrent_gemma", "falcon_mamba")  # interpreted


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_layers_hand_their_states_on_and_train_alike(family, monkeypatch):
    """The truth is float64 on whole documents; unshared rows say how much the kernels round in float32."""
    double = tiny(family, **FAMILIES[family]).double()
    double.set_experts_implementation("eager")
    torch_backend.patch(double, verify=False)
    rows = {share: PackedCollator(double, share_prefix=share)(answers((17, 3), 2)) for share in (True, False)}
    _, _, truth = loss_and_gradients(double, rows[False])

    interpret(monkeypatch)
    model = torch_backend.patch(tiny(family, **FAMILIES[family]), implementation="sdpa", verify=False)
    _, _, rounded = loss_and_gradients(model, rows[False])
    _, _, found = loss_and_gradients(model, rows[True])
    assert found.keys() == truth.keys()
    allowed = max(1e-5, 2 * max(error(rounded[name].double(), right) for name, right in truth.items()))
    assert allowed <= 5e-5
    for name, right in truth.items():
        assert error(found[name].double(), right) <= allowed, name
    said = str(torch_backend.explain(model))
    assert "own forward on batches of documents" not in said
    assert ("scan by Triton" in said) == (family != "lfm2")


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_layers_compute_a_shared_token_once(family):
    model, seen = patched(family), []
    for name, module in model.named_modules():
        if name.endswith(("out_proj", "in_proj", "in_proj_qkv")):
            module.register_forward_pre_hook(partial(lambda seen, _, given: seen.append(given[0].shape[1]), seen))
    batch = PackedCollator(model, share_prefix=True)(answers())
    with torch.no_grad():
        causal_lm_loss(model, batch)
    assert seen and set(seen) == {batch["input_ids"].numel()}
