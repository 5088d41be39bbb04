"""Shared prefixes in models: padded calls share exactly or say why not, and compiled layers need few graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packing_core.budget import EPSILON, floor_of, worst_by_bound
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.graphs import counted_compilation
from tests.torch_backend.hf.test_families import EXACT
from tests.torch_backend.models import documents, error, in_float64, tiny
from tests.torch_backend.steps.test_packed_calls import possible as possible
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.auditing.compare import differences
from torch_backend.hf.patch import state_of
from torch_backend.hf.unpadding import unpad_calls
from torch_backend.steps import cuda_graph, dynamic_compile, fast_backward
from torch_backend.steps.dynamic_compile import COMPILED, CompiledCalls


def answers(prompt: int, *lengths: int) -> tuple[Tensor, Tensor]:
    """Padded ids [B, S] of answers to one prompt, and their attention mask."""
    first, *ends = documents((prompt, *lengths))
    whole = [torch.cat([first, end]) for end in ends]
    ids = nn.utils.rnn.pad_sequence(whole, batch_first=True)
    return ids, (torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in whole])[:, None]).long()


@pytest.mark.slow
def test_rows_with_shared_prefixes_share_graphs(interpreted: None, possible: None, monkeypatch: Any) -> None:
    counter = counted_compilation(monkeypatch, dynamic_compile)
    model = patch(tiny("gemma2"), implementation="triton", verify=False)
    unpad_calls(model, always=True, share_prefix=True)
    calls = CompiledCalls(model)
    prefixes: Any = state_of(model).unpadding.prefixes
    seen = []
    for sizes in [(20, 3, 5), (18, 4, 2, 7), (25, 6, 1)]:
        ids, mask = answers(*sizes)
        gradients = []
        for alone in (False, True):
            model.zero_grad()
            rows = [(ids[i : i + 1, : int(m.sum())], m) for i, m in enumerate(mask)] if alone else [(ids, mask)]
            for x, m in rows:
                logits = model(input_ids=x, attention_mask=None if alone else m).logits
                (logits.sin() * (1 if alone else m[..., None])).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for one, other in zip(*gradients, strict=True):
            assert error(one, other) <= 1e-5, sizes
        seen.append(counter.frame_count)
    assert calls.layers == COMPILED
    assert prefixes.computed < 0.8 * prefixes.given
    assert 0 < seen[-1] == seen[1], seen  # from the first compiled call on


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_training_step_compiles_its_layers_for_forests_of_any_shape(monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    counter = counted_compilation(monkeypatch, fast_backward)
    trained = []
    for choice in ("auto", False):
        model = patch(tiny("qwen3"), implementation="triton", verify=False)
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), compile=choice)
        collate = PackedCollator(model, share_prefix=True)
        seen = []
        for prompt, *lengths in [(17, 3, 2), (18, 4, 1, 2), (16, 1, 3, 2)]:
            ids = [torch.cat([documents((prompt,))[0], end]).tolist() for end in documents(tuple(lengths), seed=2)]
            step(collate([{"input_ids": each, "prompt_length": prompt} for each in ids]))
            seen.append(counter.frame_count)
        trained.append(list(model.parameters()))
        if choice == "auto":
            assert step.parts["layers"] == "compiled, for rows of any length"
            assert step.parts["graph"].startswith("no CUDA graph: rows with shared prefixes run at any length")
            assert 0 < seen[-1] == seen[0], seen  # from the first step on
    for one, other in zip(*trained, strict=True):
        assert error(one.detach(), other.detach()) <= 1e-5


def test_compiled_layers_that_need_lengths_refuse_a_forest_by_name() -> None:
    from tests.torch_backend.collate.test_shared_prefixes import shared_and_unshared
    from torch_backend.losses.causal_lm import causal_lm_loss

    model = patch(tiny("llama"), verify=False)
    batch, _ = shared_and_unshared(model)
    causal_lm_loss(model, batch)
    state = state_of(model)
    state.compiled = set(state.requests)
    with pytest.raises(
        UnsupportedModelError, match=r"its layers are compiled \(pass compile=False\), and layers need the lengths"
    ):
        causal_lm_loss(model, batch)


@pytest.mark.gpu
def test_inductor_on_a_gpu_runs_forests_of_any_shape_as_plain_layers_do() -> None:
    models = [patch(tiny("qwen2").cuda(), implementation="triton", verify=False) for _ in range(2)]
    for model in models:
        unpad_calls(model, always=True, share_prefix=True)
    calls = CompiledCalls(models[0])
    for sizes in [(20, 3, 5), (18, 4, 2, 7), (70, 6, 1), (17, 90, 3, 2), (30, 5, 5)]:
        ids, mask = (x.cuda() for x in answers(*sizes))
        gradients = []
        for model in models:
            model.zero_grad()
            (model(input_ids=ids, attention_mask=mask).logits.sin() * mask[..., None]).sum().backward()
            gradients.append([p.grad.cpu() for p in model.parameters()])
        for one, other in zip(*gradients, strict=True):
            assert error(one, other) <= 1e-4, sizes
    assert calls.layers == COMPILED


FLOAT32 = ("inkling2_text", "xglm")  # whose own code computes in it, whatever the weights are
QUICK = ("gemma4_text", "opt", "bloom")  # sizes that differ by layer; positions of its own; ALiBi


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EXACT]
)
def test_a_call_shares_its_prompt_exactly_or_runs_as_it_is(family: str) -> None:
    ids, mask = answers(80, 3, 5, 4)
    ids, targets = ids % 30, torch.where(mask[:, 1:] == 1, ids[:, 1:] % 30, -100)
    runs = []
    for share in (False, "auto"):
        model = patch(tiny(family) if family in FLOAT32 else in_float64(tiny(family)), verify=False).train()
        unpad_calls(model, always=True, share_prefix=share)
        logits = model(input_ids=ids, attention_mask=mask).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        runs.append((logits.detach() * mask[..., None], gradients))
    prefixes = state_of(model).unpadding.prefixes
    assert (prefixes.computed == 80 + 3 + 5 + 4) == (prefixes.refused is None), str(prefixes)
    (logits, gradients), (found, shared) = runs
    assert error(found, logits) <= 1e-5
    # Recurrent layers compute in float32 whatever the weights are, and round as the audit allows float32 to.
    difference, allowed, worst = worst_by_bound(
        differences(shared, gradients), floor_of(EPSILON["float32"]), differences(gradients, gradients)
    )
    assert difference <= allowed, f"{worst}: {difference:.1e}, where rounding allows {allowed:.1e}"
