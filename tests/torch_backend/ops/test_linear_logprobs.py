"""Chunked log-probabilities and entropy against the float64 oracle of the logits that they never hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packing_core.errors import LayoutError
from tests.torch_backend.kernels import ONE_DTYPE, Where, assert_within_budget, numpy
from torch_backend.ops.linear_logprobs import linear_logprobs

ROWS, WIDTH, ENTRIES = 21, 16, 104
CHUNK = 8 * 4 * ENTRIES  # rows: the last chunk is smaller


def oracle(hidden, weight, ids, cotangents, scale, softcap, dtype: torch.dtype | None):
    """Results and gradients by way of all logits in float64, or with every result rounded to the working dtype."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x if dtype is None else torch.tensor(x).to(dtype).double().numpy()

    h, w, ids = numpy(hidden), numpy(weight), ids.cpu().numpy()
    kept = (ids[:, :1] >= 0).astype(float)
    z = rounded(rounded(h @ w.T) * scale)
    capped = z if softcap is None else rounded(softcap * rounded(np.tanh(rounded(z / softcap))))
    shifted = capped - capped.max(1, keepdims=True)
    log_p = rounded(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
    p = rounded(np.exp(log_p))
    logprobs = np.take_along_axis(log_p, np.maximum(ids, 0), 1) * kept
    entropy = rounded(-(p * log_p).sum(1)) * kept[:, 0]
    dlogprobs, dentropy = numpy(cotangents[0]) * kept, numpy(cotangents[1]) * kept[:, 0]
    dz = -p * dlogprobs.sum(1, keepdims=True) - dentropy[:, None] * p * (log_p + entropy[:, None])
    for k in range(ids.shape[1]):
        np.add.at(dz, (np.arange(len(ids)), np.maximum(ids[:, k], 0)), dlogprobs[:, k])
    dz = rounded(dz * (scale if softcap is None else scale * (1 - (capped / softcap) ** 2)))
    return {"logprobs": logprobs, "entropy": entropy, "hidden": rounded(dz @ w), "weight": rounded(dz.T @ h)}


@pytest.mark.parametrize(
    ("entries", "scale", "softcap"),
    [(ENTRIES, 1.0, None), (ENTRIES, 0.25, 3.0), (101, 1.4, None)],
    ids=["plain", "scale and softcap", "an odd vocabulary"],
)
def test_results_and_gradients_are_the_oracle(where: Where, entries: int, scale: float, softcap: float | None) -> None:
    hidden = where.draw(ROWS, WIDTH).requires_grad_()
    weight = where.draw(entries, WIDTH, seed=1).requires_grad_()
    ids = torch.arange(ROWS * 3, device=where.device).mul(37).remainder(entries).view(ROWS, 3)
    ids[4, 1:] = ids[4, :1]  # the same id three times
    ids[::5] = -100
    found = linear_logprobs(hidden, weight, ids, scale=scale, softcap=softcap, entropy=True, chunk_bytes=CHUNK)
    cotangents = [where.draw(*x.shape, seed=2).to(x.dtype) for x in found]
    gradients = torch.autograd.grad(found, (hidden, weight), cotangents)
    results = dict(zip(("logprobs", "entropy", "hidden", "weight"), (*found, *gradients), strict=True))
    arguments = hidden, weight, ids, cotangents, scale, softcap
    assert_within_budget(results, oracle(*arguments, None), oracle(*arguments, where.dtype), where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_likely_targets_keep_the_digits_of_their_gradient(where: Where) -> None:
    hidden = torch.ones(1, 1, device=where.device, dtype=where.dtype)
    weight = torch.tensor([[6.0], [0.0]], device=where.device, dtype=where.dtype).requires_grad_()
    found, _ = linear_logprobs(hidden, weight, torch.zeros(1, 1, dtype=torch.int64, device=where.device))
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    small = 1 / (1 + np.exp(6.0))  # 1 - p, which is nothing beside p in half precision
    np.testing.assert_allclose(gradient.float().cpu().numpy().ravel(), [small, -small], rtol=1e-2)


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight = torch.randn(ROWS, WIDTH), torch.randn(ENTRIES, WIDTH)
    found, entropy = linear_logprobs(hidden, weight, torch.zeros(ROWS, 1, dtype=torch.int64))
    assert not found.requires_grad and not entropy.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, r"takes hidden \[N, D\], weight \[V, D\] and ids \[N, K\]"),
        ({"weight": torch.zeros(5, 3)}, r"got hidden \[4, 2\], weight \[5, 3\], ids \[4, 1\]"),
        ({"bias": torch.zeros(4)}, r"bias must be \[5\], one per logit, got \[4\]"),
        ({"weight": torch.zeros(5, 2).half()}, "hidden and weight must share a dtype"),
    ],
)
def test_what_has_no_result_says_why(change, message) -> None:
    given = {"hidden": torch.zeros(4, 2), "weight": torch.zeros(5, 2), "ids": torch.zeros(4, 1, dtype=torch.int64)}
    with pytest.raises(LayoutError, match=message):
        linear_logprobs(**{**given, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("width", [896, 2_560])
def test_a_long_row_over_a_large_vocabulary_takes_little_memory(width: int) -> None:
    tokens, entries = 16_384, 151_936
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(entries, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, entries, (tokens, 1), device="cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found, entropy = linear_logprobs(hidden, weight, ids, entropy=True)
    (found.sum() + entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - held < 1.5 * 2**30
