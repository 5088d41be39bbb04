"""Losses over a whole vocabulary: log-probabilities of tokens, and distillation, by itself and as a step.

    python -m benchmarks.gpu --only logprobs
    python -m benchmarks.gpu --only distillation    # --match "^(fine|distil)": the step alone
    python -m benchmarks.gpu --only distillation --tiny    # a toy on the CPU, to see that everything runs

Losses: forward and backward of one row of 16,384 tokens over 151,936 entries in bfloat16, with a gradient of its own
for every token: time, and memory beyond hidden states and weights. "frozen": the output layer is not trained. "all
logits" is what trainers do that ask the model for them. Before it is timed, a loss and its gradients are compared with
those of chunks in float32; it may be off by what bfloat16 logits are off.

The step: a student of 0.5B from a teacher of 4B on packed rows of documents of mean 243, random weights, bfloat16,
compiled layers, fused AdamW on the student. "fine-tuning and a forward" trains the student on its labels and runs the
teacher with its loss: what distillation needs in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import DEVICE, DTYPE, TOY, StepClock, gpu_ms, peak_gib, relative_error
from benchmarks.gpu_step import ours_compiled
from benchmarks.harness import Figures, measured, wanted
from benchmarks.report import Result
from benchmarks.shapes import config
from benchmarks.workload import batches, documents, random_model
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.distillation import causal_lm_divergence
from torch_backend.ops.linear_divergence import LinearLogits, linear_divergence
from torch_backend.ops.linear_logprobs import linear_logprobs

TOKENS, ENTRIES, WIDTHS = (300, 500, (32, 48)) if TOY else (16_384, 151_936, (896, 2_560))
LIMIT = 2e-2  # relative error that bfloat16 logits may make
BETAS = {"forward": 0.0, "reverse": 1.0, "Jensen-Shannon": 0.5}
ROW, WARM_UP, STEPS = (256, 1, 2) if TOY else (16_384, 5, 24)
Loss = Callable[[], Tensor]  # -> [T]


def output_layer(width: int) -> LinearLogits:
    """Hidden states of a row and an output layer."""
    hidden = torch.randn(TOKENS, width, device=DEVICE, dtype=DTYPE)
    return LinearLogits(hidden, (torch.randn(ENTRIES, width, device=DEVICE) * 2 * width**-0.5).to(DTYPE))


def compare(
    section: str, case: str, name: str, loss: Loss, exact: Callable[..., Tensor] | None, leaves: Sequence[Tensor]
) -> Iterator[Result]:
    """A loss that is held to an exact one.

    Args:
        loss: a value for each token.
        exact: the same of some tokens, from the leaves in float32 and these tokens; None to hold it to nothing.
        leaves: what gets gradients.
    """
    cotangent = torch.rand(TOKENS, device=DEVICE)

    def step() -> list[Tensor]:
        values = loss()
        return [values.detach(), *torch.autograd.grad(values, leaves, cotangent.to(values.dtype))]

    def error() -> float:
        if exact is None:
            return 0.0
        wide, values = [x.detach().float().requires_grad_() for x in leaves], []
        for tokens in torch.arange(TOKENS, device=DEVICE).split(512):
            values.append(exact(tokens, *wide))
            values[-1].backward(cotangent[tokens])
        pairs = zip(step(), [torch.cat(values).detach(), *(x.grad for x in wide)], strict=True)
        return max(relative_error(x, y) for x, y in pairs if y is not None)

    yield from measured(
        section, case, name, "ms", lambda: {"ms": gpu_ms(step, 3), "GiB beyond": peak_gib(step)}, error, LIMIT
    )


# -- log-probabilities -------------------------------------------------------------------------------------------------


def all_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """As trainers compute them that take the model's logits."""
    logits = (hidden @ weight.t()).float()
    return logits.gather(1, ids).squeeze(1) - logits.logsumexp(1)


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor, *, entropy: bool = False) -> Tensor:
    logprobs, entropies = linear_logprobs(hidden, weight, ids, entropy=entropy)
    return logprobs[:, 0] + entropies if entropy else logprobs[:, 0]


LOGPROBS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token_logprobs": chunked,
    "token_logprobs with entropy": partial(chunked, entropy=True),  # its gradients are held by tests
    "all logits": all_logits,
}


def logprobs_of(ids: Tensor, frozen: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    weight = frozen.float() if weight is None else weight
    return (hidden[tokens] @ weight.t()).log_softmax(1).gather(1, ids[tokens]).squeeze(1)


def run_logprobs() -> Iterator[Result]:
    for width in WIDTHS:
        for trained in (True, False):
            torch.manual_seed(0)
            hidden, weight, *_ = output_layer(width)
            ids = torch.randint(0, ENTRIES, (TOKENS, 1), device=DEVICE)
            leaves = [hidden.requires_grad_(), *([weight.requires_grad_()] if trained else [])]
            case = f"width {width:,}, {'trained' if trained else 'frozen'} output layer"
            for name, logprobs in LOGPROBS.items():
                exact = None if "entropy" in name else partial(logprobs_of, ids, weight.detach())
                yield from compare(
                    "log-probabilities", case, name, partial(logprobs, hidden, weight, ids), exact, leaves
                )


# -- distillation ------------------------------------------------------------------------------------------------------


def run_distillation() -> Iterator[Result]:
    yield from run_divergences()
    if any(map(wanted, STEP)):
        # compiled once for all contenders
        models = [random_model(config(name)) for name in ("Qwen2-0.5B", "Qwen3-4B")]
        models[1].eval()
        for model in models:
            ours_compiled(model)
        for name, loss in STEP.items():
            measure = partial(rate, loss, *models)
            yield from measured("distillation, 0.5B from 4B", f"rows of {ROW:,}", name, "trained tokens/s", measure)


def run_divergences() -> Iterator[Result]:
    torch.manual_seed(0)
    student, teacher = map(output_layer, WIDTHS)
    leaves = [x.requires_grad_() for x in student[:2]]
    case = f"{TOKENS:,} tokens, {ENTRIES:,} entries, widths {WIDTHS[0]:,} and {WIDTHS[1]:,}"
    for name, beta in BETAS.items():
        loss = partial(trained_divergence, student, teacher, beta)
        yield from compare("distillation, the loss", case, name, loss, partial(divergence, teacher, beta), leaves)


def trained_divergence(student: LinearLogits, teacher: LinearLogits, beta: float) -> Tensor:
    return linear_divergence(student, teacher, beta=beta)[0]


def divergence(teacher: LinearLogits, beta: float, tokens: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    log_p = (hidden[tokens] @ weight.t()).log_softmax(1)
    log_q = (teacher.hidden[tokens].float() @ teacher.weight.float().t()).log_softmax(1)
    log_m = {0.0: log_p, 1.0: log_q}.get(beta, ((1 - beta) * log_p.exp() + beta * log_q.exp()).log())
    of_teacher, of_student = ((x.exp() * (x - log_m)).sum(1) for x in (log_q, log_p))
    return {0.0: of_teacher, 1.0: of_student}.get(beta, beta * of_teacher + (1 - beta) * of_student)


def fine_tuning_and_a_forward(student: Any, teacher: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        causal_lm_loss(teacher, batch)
    return causal_lm_loss(student, batch)


STEP: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "fine-tuning and a forward": fine_tuning_and_a_forward,
    "distillation, forward": partial(causal_lm_divergence, beta=0.0),
    "distillation, Jensen-Shannon": partial(causal_lm_divergence, beta=0.5),
}


def rate(loss: Callable[..., tuple[Tensor, Tensor]], student: Any, teacher: Any) -> Figures:
    """Trained tokens per second of steps of one row each, and the most memory allocated."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=not TOY)
    rows, clock = batches("fixed", documents(), ROW), StepClock(WARM_UP, STEPS)

    def step(batch: Mapping[str, Any]) -> None:
        total, count = loss(student, teacher, batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    clock.loop(step, cycle(rows))
    tokens = clock.in_timed([int((batch["labels"] != -100).sum()) for batch in rows])
    return {"trained tokens/s": tokens / clock.seconds, "GiB": clock.timed_peak}
