"""Distillation over a whole vocabulary: the loss by itself, and a student of 0.5B from a teacher of 4B on packed rows.

    python -m benchmarks.gpu_distillation           # --match "^(fine|distil)": the step alone
    python -m benchmarks.gpu_distillation --tiny    # a toy on the CPU, to see that everything runs

The loss: forward and backward of one row of 16,384 tokens over 151,936 entries in bfloat16: time, and memory beyond
hidden states and weights. Before it is timed, it is compared with float32, a few rows at a time.

The step: documents of mean 243, random weights, bfloat16, compiled layers, fused AdamW on the student. "fine-tuning and
a forward" trains the student on its labels and runs the teacher with its loss: what distillation needs in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_clock as clock
from benchmarks.gpu import collected, parsed, parser, survived
from benchmarks.gpu_clock import DEVICE, TOY, Result
from benchmarks.gpu_step import ours_compiled
from benchmarks.gpu_workload import DTYPE, Shape, batches, documents, make_model, qwen2
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.distillation import causal_lm_divergence
from torch_backend.ops.linear_divergence import LinearLogits, linear_divergence

TOKENS, ENTRIES, WIDTHS = (300, 500, (32, 48)) if TOY else (16_384, 151_936, (896, 2_560))
BETAS = {"forward": 0.0, "reverse": 1.0, "Jensen-Shannon": 0.5}
ROW, WARM_UP, STEPS = (256, 1, 2) if TOY else (16_384, 5, 24)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    chosen = parsed(parser(__doc__), arguments)
    return collected(survived("distillation", run()), chosen.output, "gpu_distillation")


def run() -> Iterator[Result]:
    for name in filter(clock.wanted, BETAS):
        yield from loss_alone(name)
    models = models_of_step() if any(map(clock.wanted, STEP)) else ()
    for name in filter(clock.wanted, STEP):
        figures, note = clock.gated(lambda: 0.0, 0.0, partial(rate, STEP[name], *models))
        clock.free()
        for unit in ("trained tokens/s", "GiB"):
            yield Result(
                "distillation, 0.5B from 4B", f"rows of {ROW:,}", name, figures.get(unit), unit, "" if figures else note
            )


def loss_alone(name: str) -> Iterator[Result]:
    torch.manual_seed(0)
    sides = []
    for width in WIDTHS:
        hidden = torch.randn(TOKENS, width, device=DEVICE, dtype=DTYPE)
        sides.append(LinearLogits(hidden, (torch.randn(ENTRIES, width, device=DEVICE) * 2 * width**-0.5).to(DTYPE)))
    (student, teacher), cotangent = sides, torch.rand(TOKENS, device=DEVICE)
    wrt = [x.requires_grad_() for x in student[:2]]

    def step() -> tuple[Tensor, ...]:
        divergence, _ = linear_divergence(student, teacher, beta=BETAS[name])
        return divergence.detach(), *torch.autograd.grad(divergence, wrt, cotangent)

    def error() -> float:
        hidden, weight = (x.detach().float().requires_grad_() for x in wrt)
        right, beta = [], BETAS[name]
        for part in torch.arange(TOKENS, device=DEVICE).split(512):
            log_p = (hidden[part] @ weight.t()).log_softmax(1)
            log_q = (teacher.hidden[part].float() @ teacher.weight.float().t()).log_softmax(1)
            log_m = {0.0: log_p, 1.0: log_q}.get(beta, ((1 - beta) * log_p.exp() + beta * log_q.exp()).log())
            of_teacher, of_student = ((x.exp() * (x - log_m)).sum(1) for x in (log_q, log_p))
            right.append({0.0: of_teacher, 1.0: of_student}.get(beta, beta * of_teacher + (1 - beta) * of_student))
            right[-1].backward(cotangent[part])
        return max(map(clock.relative_error, step(), (torch.cat(right).detach(), hidden.grad, weight.grad)))

    figures, note = clock.gated(error, 2e-2, lambda: {"ms": clock.gpu_ms(step, 3), "GiB beyond": clock.peak_gib(step)})
    case = f"{TOKENS:,} tokens, {ENTRIES:,} entries, widths {WIDTHS[0]:,} and {WIDTHS[1]:,}"
    for unit in ("ms", "GiB beyond"):
        yield Result("distillation, the loss", case, name, figures.get(unit), unit, note)


def qwen3_4b(few: bool) -> Any:
    from transformers import Qwen3Config

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = (96, 128, 4, 2, 32, 199) if TOY else (2_560, 9_728, 32, 8, 128, 151_936)
    layers = 2 if few or TOY else 36
    return Qwen3Config(**dict(zip(names, sizes, strict=True)), num_hidden_layers=layers, tie_word_embeddings=True)


def fine_tuning_and_a_forward(student: Any, teacher: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        causal_lm_loss(teacher, batch)
    return causal_lm_loss(student, batch)


STEP: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "fine-tuning and a forward": fine_tuning_and_a_forward,
    "distillation, forward": partial(causal_lm_divergence, beta=0.0),
    "distillation, Jensen-Shannon": partial(causal_lm_divergence, beta=0.5),
}


def models_of_step() -> list[Any]:
    """The student and the teacher, compiled once for all contenders."""
    models = [make_model(Shape("", make, (ROW,)), None, few=False) for make in (qwen2, qwen3_4b)]
    models[1].eval()
    for model in models:
        ours_compiled(model)
    return models


def rate(loss: Callable[..., tuple[Tensor, Tensor]], student: Any, teacher: Any) -> dict[str, float]:
    """Trained tokens per second of steps of one row each, and the most memory allocated."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=not TOY)
    rows = batches("fixed", documents(), ROW)

    def step(batch: Mapping[str, Any]) -> None:
        total, count = loss(student, teacher, batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    timed = list(islice(cycle(rows), WARM_UP + STEPS))
    for i, batch in enumerate(timed):
        if i == WARM_UP:
            clock.synchronize()
            torch.cuda.reset_peak_memory_stats() if not TOY else None
            begin = time.perf_counter()
        step(batch)
    clock.synchronize()
    seconds = time.perf_counter() - begin
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in timed[WARM_UP:])
    return {"trained tokens/s": tokens / seconds, "GiB": clock.highest_gib()}


if __name__ == "__main__":
    main()
