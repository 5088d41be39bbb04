"""A student's divergence from a teacher on packed rows is that of all logits of both models, document by document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from tests.torch_backend.kernels import Elements
from tests.torch_backend.losses.test_token_logprobs import batch as batch
from tests.torch_backend.models import collate, documents, patched, tiny
from torch_backend import PackedCollator, patch
from torch_backend.losses.cross_entropy import normalise
from torch_backend.losses.distillation import causal_lm_divergence
from torch_backend.ops.linear_divergence import linear_divergence

BETAS = (0.0, 1.0, 0.5, 0.1)


def larger(family: str = "llama", **changes: Any) -> Any:
    """A patched teacher of another width and depth."""
    changes = {"hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 3, "layer_types": None} | changes
    return patched(family, seed=7, **changes).eval()


def written_out(student: nn.Module, teacher: nn.Module, batch: dict[str, Any], beta: float, temperature: float = 1.0):
    """The sum over trained tokens by way of both models' logits [B, S, V]."""
    p, q = (
        (model(**{k: x for k, x in batch.items() if k != "labels"}).logits[:, :-1] / temperature).softmax(-1)
        for model in (student, teacher)
    )
    m = (1 - beta) * p + beta * q

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    per_token = {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, m) + (1 - beta) * kl(p, m))
    return per_token[batch["labels"][:, 1:] != -100].sum()


def gradients_of(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite", "phi"])  # a softcap, a scale, a bias
def test_it_is_that_of_all_logits_with_its_gradients(family: str, beta: float, batch: dict[str, Any]) -> None:
    student, teacher = patched(family).double(), larger().double()
    total, count = causal_lm_divergence(student, teacher, batch, beta=beta, temperature=0.7)
    right = written_out(student, teacher, batch, beta, temperature=0.7)
    assert count == (batch["labels"] != -100).sum()
    torch.testing.assert_close(total, right, rtol=1e-10, atol=0, check_dtype=False)
    for x, y in zip(gradients_of(student, total), gradients_of(student, right), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gradients_do_not_depend_on_the_micro_batches(rows: int) -> None:
    """Eight rows of 1 to 20 tokens as 8 micro-batches of one row, 4 of two and 2 of four, against one of eight."""
    student, teacher = patched("qwen2").double(), larger().double()
    docs = documents((20, 2, 19, 3, 20, 1, 11, 17))

    def step(size: int) -> list[Tensor | None]:
        batches = [collate(docs[i : i + size], capacity=20) for i in range(0, 8, size)]
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        losses = [causal_lm_divergence(student, teacher, batch, beta=0.5)[0] for batch in batches]
        return gradients_of(student, sum(normalise(loss, count) for loss in losses))

    for x, y in zip(step(rows), step(8), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_without_a_trained_token_it_is_0_and_so_are_its_gradients(batch: dict[str, Any]) -> None:
    batch["labels"].fill_(-100)
    student = patched("qwen2")
    total, count = causal_lm_divergence(student, larger(), batch, beta=0.5)
    loss = normalise(total, count)
    assert count == 0 and loss == 0
    assert not any(g.any() for g in gradients_of(student, loss) if g is not None)


def test_weights_of_targets_and_a_bound_of_their_number(batch: dict[str, Any]) -> None:
    student, teacher = patched("qwen2"), larger()
    total, count = causal_lm_divergence(student, teacher, batch)
    weights = torch.full(batch["labels"].shape, 0.5)
    halves = causal_lm_divergence(student, teacher, {**batch, "loss_weights": weights})
    torch.testing.assert_close((2 * halves[0], 2 * halves[1]), (total, count))
    few = causal_lm_divergence(student, teacher, {**batch, "packed_targets": int(count)})
    torch.testing.assert_close(few, (total, count))


def test_no_tensor_has_the_size_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = patched("qwen2"), larger(hidden_size=48)
    batch, entries = collate(documents((5, 9, 30) * 5), capacity=None), student.config.vocab_size
    monkeypatch.setitem(linear_divergence.__kwdefaults__, "chunk_bytes", 8 * entries)
    causal_lm_divergence(student, teacher, batch)  # the first call looks at what the models do to their logits
    with Elements() as seen:
        causal_lm_divergence(student, teacher, batch)[0].backward()
    assert 0 < seen.largest < batch["labels"].numel() * entries


def test_answers_that_share_a_prompt_have_the_gradients_of_whole_documents() -> None:
    student, teacher = patched("qwen2").double(), larger().double()
    prompt, *answers = documents((20, 9, 30))
    rows = [{"input_ids": torch.cat([prompt, x]), "labels": torch.cat([prompt * 0 - 100, x])} for x in answers]
    batches = [PackedCollator(student, capacity=128, share_prefix=share)(rows) for share in (True, False)]
    assert "packed_parents" in batches[0]
    found, right = (causal_lm_divergence(student, teacher, batch, beta=0.5) for batch in batches)
    torch.testing.assert_close(found, right)
    for x, y in zip(gradients_of(student, found[0]), gradients_of(student, right[0]), strict=True):
        torch.testing.assert_close(x, y)


def test_what_cannot_be_compared_is_refused(batch: dict[str, Any]) -> None:
    student = patched("qwen2")
    calls = []
    student.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(LayoutError, match=r"vocabulary of \d+ entries and the teacher one of 128.*same tokeniser"):
        causal_lm_divergence(student, larger(vocab_size=128), batch)
    with pytest.raises(PackingError, match="beta must be from 0"):
        causal_lm_divergence(student, larger(), batch, beta=-0.1)
    assert not calls, "before the student runs"
    with pytest.raises(PackingError, match="temperature must be above 0"):
        causal_lm_divergence(student, larger(), batch, temperature=0)
    with pytest.raises(LayoutError, match="batch with labels"):
        causal_lm_divergence(student, larger(), {"input_ids": batch["input_ids"]})
    teacher = larger()
    teacher.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(
        UnsupportedModelError, match=r"an output layer \(Linear\) is not plainly linear.*distil by top_k"
    ):
        causal_lm_divergence(student, teacher, batch)


def test_a_teacher_in_half_precision_and_a_student_under_peft(batch: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    base, teacher = tiny("qwen2"), larger()
    student = patch(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])), verify=False)
    half = larger().bfloat16()
    loss, right = (causal_lm_divergence(student, each, batch)[0] for each in (half, teacher))
    torch.testing.assert_close(loss, right, rtol=0.05, atol=0.01)
    loss.backward()
    trained = [p for p in student.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained) and base.lm_head.weight.grad is None
