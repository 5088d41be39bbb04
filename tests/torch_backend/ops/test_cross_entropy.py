"""The chunked linear cross-entropy against the float64 oracle of the logits it never holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packing_core import reference
from packing_core.errors import LayoutError
from tests.torch_backend.kernels import FLOAT32, ONE_DTYPE, Where, assert_compiles, assert_within_budget, numpy
from torch_backend import normalise, packed_cross_entropy
from torch_backend.ops import linear_cross_entropy as cross_entropy
from torch_backend.ops.linear_cross_entropy import linear_cross_entropy

ROWS, WIDTH, ENTRIES = 21, 16, 104
CHUNK = 8  # rows: the last chunk is smaller


def inputs(where: Where, biased: bool):
    hidden = where.draw(ROWS, WIDTH).requires_grad_()
    weight = where.draw(ENTRIES, WIDTH, seed=1).requires_grad_()
    bias = where.draw(ENTRIES, seed=2).requires_grad_() if biased else None
    targets = torch.arange(ROWS).mul(37).remainder(ENTRIES).to(where.device)
    targets[::5] = -100
    return hidden, weight, bias, targets


def oracle(hidden, weight, bias, targets, weights, scale, softcap, dtype: torch.dtype | None):
    """Loss and gradients by way of all logits in float64, or with every result rounded to the working dtype."""
    working = str(dtype).removeprefix("torch.") if dtype else "float64"

    def rounded(x: np.ndarray) -> np.ndarray:
        return x if dtype is None else torch.tensor(x).to(dtype).double().numpy()

    h, w = numpy(hidden), numpy(weight)
    z = rounded(rounded(h @ w.T + (0 if bias is None else numpy(bias))) * scale)
    capped = z if softcap is None else rounded(softcap * rounded(np.tanh(rounded(z / softcap))))
    options = {"weights": None if weights is None else numpy(weights), "dtype": working}
    loss, _ = reference.cross_entropy(capped, targets.cpu().numpy(), **options)
    slope = scale if softcap is None else scale * (1 - (capped / softcap) ** 2)
    dz = rounded(reference.cross_entropy_vjp(capped, targets.cpu().numpy(), **options)["logits"] * slope)
    found = {"loss": np.array(loss), "hidden": rounded(dz @ w), "weight": rounded(dz.T @ h)}
    return found if bias is None else found | {"bias": rounded(dz.sum(0))}


@pytest.mark.parametrize(
    ("biased", "weighted", "scale", "softcap"),
    [(False, False, 1.0, None), (True, True, 1.0, None), (False, True, 0.25, 3.0)],
    ids=["plain", "bias and weights", "scale and softcap"],
)
def test_loss_and_gradients_are_the_oracle(where, biased, weighted, scale, softcap):
    hidden, weight, bias, targets = inputs(where, biased)
    weights = torch.linspace(0.5, 2.0, ROWS, device=where.device) if weighted else None
    loss, total = linear_cross_entropy(
        hidden, weight, targets, bias=bias, weights=weights, scale=scale, softcap=softcap,
        chunk_bytes=CHUNK * ENTRIES * where.dtype.itemsize,
    )  # fmt: skip
    wanted = {"hidden": hidden, "weight": weight} | ({"bias": bias} if biased else {})
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    found = {"loss": loss, **dict(zip(wanted, gradients, strict=True))}
    arguments = hidden, weight, bias, targets, weights, scale, softcap
    assert_within_budget(found, oracle(*arguments, None), oracle(*arguments, where.dtype), where.dtype)
    counted = targets != -100
    assert total.item() == pytest.approx((counted if weights is None else weights * counted).sum().item())


def check(hidden, weight, targets, *, softcap: float | None = None, **options) -> float:
    """Loss and gradients are the oracle's, by the budget of the working dtype. Returns the loss."""
    loss, _ = linear_cross_entropy(hidden, weight, targets, softcap=softcap, **options)
    found = {"loss": loss, **dict(zip(("hidden", "weight"), torch.autograd.grad(loss, (hidden, weight)), strict=True))}
    arguments = hidden, weight, None, targets, None, 1.0, softcap
    assert_within_budget(found, oracle(*arguments, None), oracle(*arguments, hidden.dtype), hidden.dtype)
    return loss.item()


@pytest.mark.parametrize(
    ("rows", "entries"), [(140, 600), (21, 101)], ids=["several tiles", "rows that the copy engine cannot take"]
)
def test_any_size(where, rows, entries):
    hidden = where.draw(rows, WIDTH).requires_grad_()
    weight = where.draw(entries, WIDTH, seed=1).requires_grad_()
    check(hidden, weight, torch.arange(rows, device=where.device).mul(37).remainder(entries))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_logits_and_powers_give_the_same(where, monkeypatch):
    hidden, weight, _, targets = inputs(where, False)
    assert cross_entropy._takes_powers(hidden, weight, None) or where.device.type == "cuda"
    check(hidden, weight, targets, softcap=3.0)
    monkeypatch.setattr(cross_entropy, "_takes_powers", lambda *given: False)
    check(hidden, weight, targets, softcap=3.0)


def test_targets_that_the_model_rules_out_have_their_loss(where):
    """Powers of other logits over the target's overflow: those rows are made from their logits."""
    hidden, weight, _, targets = inputs(where, False)
    with torch.no_grad():
        hidden[3:7] *= 25
        targets[3:7] = (hidden[3:7] @ weight.t()).argmin(1)
    assert check(hidden, weight, targets) > 4 * 100


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
def test_chunks_change_nothing_but_the_rounding_of_sums(where):
    hidden, weight, _, targets = inputs(where, False)
    runs = []
    for rows in (1, 5, ROWS):
        loss, _ = linear_cross_entropy(hidden, weight, targets, chunk_bytes=rows * ENTRIES * where.dtype.itemsize)
        runs.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for run in runs[1:]:
        for x, y in zip(run, runs[0], strict=True):
            torch.testing.assert_close(x, y, rtol=2 * torch.finfo(where.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_a_quotient_of_sums_scales_the_gradients(where):
    hidden, weight, _, targets = inputs(where, False)
    loss, total = linear_cross_entropy(hidden, weight, targets)
    (whole,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (mean,) = torch.autograd.grad(loss / total, hidden)
    torch.testing.assert_close(mean, whole / total.to(where.dtype), rtol=2 * torch.finfo(where.dtype).eps, atol=0)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("target", [-1, ENTRIES, ENTRIES + 9])
def test_a_target_that_is_no_class_has_no_loss_and_weighs_nothing_where_it_has_no_weight(where, target):
    """Its logit would be one of another row."""
    hidden, weight, _, targets = inputs(where, False)
    place = torch.arange(ROWS, device=where.device) == 7
    wrong = torch.where(place, target, targets)
    loss, _ = linear_cross_entropy(hidden, weight, wrong)
    assert loss.isnan() and all(x.isnan().all() for x in torch.autograd.grad(loss, (hidden, weight)))

    weights = (~place).float()
    without_class, right = (linear_cross_entropy(hidden, weight, x, weights=weights) for x in (wrong, targets))
    gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss, _ in (without_class, right))
    assert without_class[1] == right[1] == (targets != -100).sum() - 1 and without_class[0] == right[0]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_only_what_is_wanted_is_made(where):
    hidden, weight, _, targets = inputs(where, False)
    frozen, _ = linear_cross_entropy(hidden, weight.detach(), targets)
    both, _ = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(torch.autograd.grad(frozen, hidden)[0], torch.autograd.grad(both, hidden)[0])
    with torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(loss, both) and not loss.requires_grad


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_compiles_into_one_graph(where):
    hidden, weight, _, targets = inputs(where, False)

    def step(hidden, weight):
        loss, total = linear_cross_entropy(hidden * 2, weight, targets)
        return loss / total

    assert_compiles(step, (hidden, weight))


def test_plain_torch_runs_where_triton_does_not():
    hidden, weight, bias, targets = inputs(Where(torch.device("cpu"), torch.float64), True)
    loss, _ = linear_cross_entropy(hidden, weight, targets, bias=bias, scale=0.5, softcap=3.0, chunk_bytes=8 * 800)
    exact = oracle(hidden, weight, bias, targets, None, 0.5, 3.0, None)
    found = dict(zip(("hidden", "weight", "bias"), torch.autograd.grad(loss, (hidden, weight, bias)), strict=True))
    for name, x in ({"loss": loss} | found).items():
        assert np.abs(numpy(x) - exact[name]).max() < 1e-12 * max(1, np.abs(exact[name]).max()), name


H, W, T = torch.zeros(4, 8), torch.zeros(10, 8), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": H[:0], "targets": T[:0]}, r"needs at least one row, got hidden \[0, 8\]"),
        ({"targets": T[:3]}, r"hidden \[4, 8\], weight \[10, 8\], targets \[3\]"),
        ({"weight": W[:, :4]}, r"weight \[10, 4\]"),
        ({"bias": torch.zeros(8)}, r"bias must be \[10\], one per logit, got \[8\]"),
        ({"weights": torch.zeros(3)}, r"weights must have the shape of the targets, \[4\]: \[3\]"),
        ({"weight": W.half()}, r"must share a dtype, got torch.float32 and torch.float16"),
    ],
)
def test_what_has_no_loss_says_why(change, message):
    with pytest.raises(LayoutError, match=message):
        linear_cross_entropy(**{"hidden": H, "weight": W, "targets": T} | change)


def test_a_step_without_targets_has_loss_0_and_gradients_of_0():
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = normalise(*packed_cross_entropy(logits, torch.full((1, 4), -100)))
    loss.backward()
    assert loss == 0 and not logits.grad.any()
