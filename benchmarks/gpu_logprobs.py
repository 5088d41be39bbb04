"""Log-probabilities of a row's tokens, and their gradients: time, and memory beyond the hidden states and the weight.

    python -m benchmarks.gpu --only logprobs

One row of 16,384 tokens over a vocabulary of 151,936, in bfloat16; hidden states and the output layer's weight are made
before. Forward and backward, with a gradient of its own for every token, as losses over documents send them; "frozen":
the output layer is not trained. The contender besides ours makes all logits, as trainers do that ask the model for
them. Before it is timed, its log-probabilities and gradients are compared with those of chunks in float32; it may be
off by what bfloat16 logits are off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_clock import DEVICE, TOY, Result, gated, gpu_ms, peak_gib, relative_error, wanted
from benchmarks.gpu_workload import DTYPE
from torch_backend.ops.linear_logprobs import linear_logprobs

TOKENS, ENTRIES = (300, 500) if TOY else (16_384, 151_936)
WIDTHS = (32,) if TOY else (896, 2_560)
LIMIT = 2e-2  # relative error that bfloat16 logits may make
Gradients = tuple[Tensor, ...]


def all_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """As trainers compute them that take the model's logits."""
    logits = (hidden @ weight.t()).float()
    return logits.gather(1, ids).squeeze(1) - logits.logsumexp(1)


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor, *, entropy: bool = False) -> Tensor:
    logprobs, entropies = linear_logprobs(hidden, weight, ids, entropy=entropy)
    return logprobs[:, 0] + entropies if entropy else logprobs[:, 0]


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token_logprobs": chunked,
    "token_logprobs with entropy": partial(chunked, entropy=True),
    "all logits": all_logits,
}


def run() -> Iterator[Result]:
    for width in WIDTHS:
        for trained in (True, False):
            case = f"width {width:,}, {'trained' if trained else 'frozen'} output layer"
            for name in filter(wanted, CONTENDERS):
                yield from _measured(case, name, width, trained)


def _measured(case: str, name: str, width: int, trained: bool) -> Iterator[Result]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, width, device=DEVICE, dtype=DTYPE).requires_grad_()
    weight = (torch.randn(ENTRIES, width, device=DEVICE) * 2 * width**-0.5).to(DTYPE).requires_grad_(trained)
    ids = torch.randint(0, ENTRIES, (TOKENS, 1), device=DEVICE)
    cotangent = torch.randn(TOKENS, device=DEVICE)
    wrt = (hidden, weight) if trained else (hidden,)

    def step() -> tuple[Tensor, Gradients]:
        logprobs = CONTENDERS[name](hidden, weight, ids)
        return logprobs, torch.autograd.grad(logprobs, wrt, cotangent.to(logprobs.dtype))

    def check() -> float:
        if "entropy" in name:
            return 0.0  # gradients of the sum of both: the tests compare them
        logprobs, gradients = step()
        right, expected = _in_float32(hidden, weight, ids, cotangent)
        pairs = zip((logprobs, *gradients), (right, *expected), strict=False)
        return max(relative_error(x, y) for x, y in pairs)

    def measure() -> dict[str, float]:
        return {"ms": gpu_ms(step, 3), "GiB beyond": peak_gib(step)}

    figures, note = gated(check, LIMIT, measure)
    for unit in ("ms", "GiB beyond"):
        yield Result("log-probabilities", case, name, figures.get(unit), unit, note)


def _in_float32(hidden: Tensor, weight: Tensor, ids: Tensor, cotangent: Tensor) -> tuple[Tensor, Gradients]:
    """Log-probabilities and the gradients of hidden states and weight, a few rows at a time."""
    wide = weight.detach().float()
    logprobs, dhidden, dweight = [], [], torch.zeros_like(wide)
    for part in torch.arange(TOKENS, device=DEVICE).split(512):
        x = hidden.detach()[part].float()
        log_p = (x @ wide.t()).log_softmax(1)
        logprobs.append(log_p.gather(1, ids[part]).squeeze(1))
        dlogits = -log_p.exp_() * cotangent[part, None]
        dlogits.scatter_add_(1, ids[part], cotangent[part, None])
        dhidden.append(dlogits @ wide)
        dweight += dlogits.t() @ x
    return torch.cat(logprobs), (torch.cat(dhidden), dweight)
