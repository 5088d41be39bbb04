"""Chunked divergences over a whole vocabulary against all logits of both models in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packing_core.errors import LayoutError, PackingError
from tests.torch_backend.kernels import FLOAT32, Where
from torch_backend.ops.linear_divergence import LinearLogits, linear_divergence

ROWS, WIDTH, WIDER, ENTRIES = 21, 16, 24, 104
CHUNK = 8 * 8 * ENTRIES  # bytes: the last chunk is smaller
BETAS = (0.0, 1.0, 0.5, 0.1)


def written_out(student: LinearLogits, teacher: LinearLogits, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence and entropy as their definitions say, from [N, V]."""

    def distribution(side: LinearLogits) -> Tensor:
        logits = side.hidden @ side.weight.T
        logits = (logits if side.bias is None else logits + side.bias) * side.scale
        return (logits if side.softcap is None else side.softcap * torch.tanh(logits / side.softcap)).softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    p, q = distribution(student), distribution(teacher)
    m = (1 - beta) * p + beta * q
    divergence = {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, m) + (1 - beta) * kl(p, m))
    return divergence, -(p * p.log()).sum(-1)


def both(
    draw, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None, entries: int = ENTRIES
) -> tuple[LinearLogits, LinearLogits]:
    sides = []
    for seed, width in ((0, WIDTH), (1, WIDER)):
        hidden, weight = draw(ROWS, width, seed=seed), draw(entries, width, seed=seed + 2) / 2
        sides.append(LinearLogits(hidden, weight, draw(entries, seed=seed) if bias else None, scale, softcap))
    for x in filter(lambda x: x is not None, sides[0][:3]):
        x.requires_grad_()
    return sides[0], sides[1]


def exact(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash((seed, *shape)))).double()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", [{}, {"bias": True, "scale": 0.5, "softcap": 3.0}], ids=["plain", "all parts"])
def test_values_and_gradients_are_exact_in_float64(beta: float, options) -> None:
    student, teacher = both(exact, **options)
    wrt = [x for x in student[:3] if x is not None]
    found, truth = (
        linear_divergence(student, teacher, beta=beta, chunk_bytes=CHUNK),
        written_out(student, teacher, beta),
    )
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    assert not found[1].requires_grad
    factors = exact(ROWS, seed=9)
    gradients = (torch.autograd.grad(x[0], wrt, factors) for x in (found, truth))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_those_of_differences(beta: float) -> None:
    student, teacher = both(exact, entries=7, softcap=2.0)

    def divergence(hidden: Tensor, weight: Tensor) -> Tensor:
        side = student._replace(hidden=hidden, weight=weight)
        return linear_divergence(side, teacher, beta=beta, chunk_bytes=256)[0]

    assert torch.autograd.gradcheck(divergence, student[:2])


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 3.0, "entries": 101}], ids=["plain", "softcap"])
def test_kernels_compute_the_same(where: Where, beta: float, options) -> None:
    student, teacher = both(where.draw, **options)
    found = linear_divergence(student, teacher, beta=beta, chunk_bytes=CHUNK)
    truth = written_out(*(LinearLogits(*(x.double() for x in s[:2]), *s[2:]) for s in (student, teacher)), beta)
    factors = where.draw(ROWS, seed=9)
    gradients = torch.autograd.grad(found[0], student[:2], factors)
    expected = torch.autograd.grad(truth[0], student[:2], factors.double())
    for x, y in zip((*found, *gradients), (*truth, *expected), strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_a_teacher_of_another_dtype_and_no_gradient_that_is_not_wanted() -> None:
    student, teacher = both(lambda *shape, seed=0: exact(*shape, seed=seed).float())
    half = LinearLogits(teacher.hidden.bfloat16(), teacher.weight.bfloat16())
    found, _ = linear_divergence(student._replace(weight=student.weight.detach()), half, beta=1.0)
    found.sum().backward()
    assert student.hidden.grad is not None and student.weight.grad is None
    with torch.no_grad():
        truth, _ = written_out(student, LinearLogits(half.hidden.float(), half.weight.float()), 1.0)
    torch.testing.assert_close(found, truth, rtol=1e-1, atol=1e-2)


def test_a_distribution_far_from_the_other_is_finite_and_equal_ones_diverge_by_nothing() -> None:
    student, teacher = both(exact)
    far = teacher._replace(hidden=teacher.hidden * 1e3)
    for beta in BETAS:
        divergence, _ = linear_divergence(student, far, beta=beta)
        gradients = torch.autograd.grad(divergence.sum(), student[:2])
        assert all(x.isfinite().all() for x in (divergence, *gradients))
        same, _ = linear_divergence(student, LinearLogits(*student[:2]), beta=beta)
        assert same.abs().max() < 1e-14 and torch.autograd.grad(same.sum(), student.hidden)[0].abs().max() < 1e-14
    none, _ = linear_divergence(student._replace(hidden=student.hidden[:0]), far._replace(hidden=far.hidden[:0]))
    none.sum().backward()
    assert not student.weight.grad.any()


def test_what_cannot_be_compared_is_refused() -> None:
    student, teacher = both(exact)
    with pytest.raises(LayoutError, match=r"104 entries and the teacher one of 100.*resize_token_embeddings"):
        linear_divergence(student, teacher._replace(weight=teacher.weight[:100]))
    with pytest.raises(LayoutError, match="21 hidden states and the teacher 20"):
        linear_divergence(student, teacher._replace(hidden=teacher.hidden[:20]))
    with pytest.raises(LayoutError, match="got of the teacher"):
        linear_divergence(student, teacher._replace(weight=teacher.weight.float()))
    with pytest.raises(PackingError, match="beta must be from 0"):
        linear_divergence(student, teacher, beta=1.5)
