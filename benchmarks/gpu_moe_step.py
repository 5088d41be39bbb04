"""The training step of models with experts, cut to a few layers: sections of ``python -m benchmarks.gpu_moe``.

Models train in full, or by adapters of rank 16 on attention and experts. Rules and figures are those of
:mod:`.gpu_step`. All shapes run at the shorter rows first, ours and ``grouped_mm`` before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_clock import QUICK, TOY, Result, free, wanted
from benchmarks.gpu_moe_shapes import Experts, available
from benchmarks.gpu_step import Contender, Loss, ours_alone, ours_compiled, race, stock, stock_liger
from benchmarks.gpu_trainer_runs import measure

ROWS = (256,) if TOY else (8_192,) if QUICK else (8_192, 16_384)
TRAINER = "Trainer, enable_packing"
WHOLE_LAYERS = 2 if TOY else 24  # of gpt-oss-20b
OURS = Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True)
RECOMPUTED = Contender(
    "ours, compiled and captured, layers recomputed", partial(ours_compiled, memory="full"), "fixed", captured=True
)
TOY_RUNS = {"ours", "ours, grouped_mm", "padded, grouped_mm"}


def with_experts(name: str, prepare: Callable[[Any], Loss]) -> Callable[[Any], Loss]:
    """As ``prepare``, with the experts on the implementation of that name, which a patch leaves alone."""

    def prepared(model: Any) -> Loss:
        model.set_experts_implementation(available(name))
        for module in model.modules():
            if hasattr(module, "_apply_gate"):
                module.forward = partial(type(module).forward, module)  # a patch keeps forwards that others set
        return prepare(model)

    return prepared


def compiled(name: str) -> Callable[[Any], Loss]:
    return partial(ours_compiled, alone=with_experts(name, ours_alone))


@cache
def stock_attention() -> str | None:
    """Flash-attn-4 where it is installed, else the shape's."""
    from importlib.util import find_spec

    return "flash_attention_4" if not TOY and find_spec("flash_attn") and find_spec("flash_attn.cute") else None


def contenders() -> list[Contender]:
    """Ours, the best stock step, each experts implementation in both, and padded batches."""
    stock_on, few = stock_attention(), ROWS[:1]
    # Liger's experts would stand in place of grouped_mm, and are tuned for minutes (0.8.5).
    liger = with_experts("grouped_mm", partial(stock_liger, swiglu=False))
    return [
        OURS,
        Contender("stock packed, grouped_mm", with_experts("grouped_mm", stock), "stock", stock_on),
        Contender("stock packed, grouped_mm, Liger", liger, "stock", stock_on),
        Contender("ours, grouped_mm, compiled and captured", compiled("grouped_mm"), "fixed", captured=True),
        Contender("ours", ours_alone),
        Contender("ours, grouped_mm", with_experts("grouped_mm", ours_alone)),
        Contender("stock packed, eager", with_experts("eager", stock), "stock", stock_on, capacities=few),
        Contender("stock packed, batched_mm", with_experts("batched_mm", stock), "stock", stock_on, capacities=few),
        Contender("ours, eager", with_experts("eager", ours_alone), capacities=few),
        Contender("ours, batched_mm", with_experts("batched_mm", ours_alone), capacities=few),
        Contender("padded, grouped_mm", with_experts("grouped_mm", stock), "padded", capacities=few),
    ]


def run_step(shapes: Sequence[Experts], lora: bool = False) -> Iterator[Result]:
    racing = [c for c in contenders() if not TOY or c.name in TOY_RUNS]
    for rows in ROWS:
        these = [replace(c, capacities=(rows,)) for c in racing if not c.capacities or rows in c.capacities]
        for shape in shapes:
            yield from race(shape.step(ROWS, lora), these)


def run_adapted_step(shapes: Sequence[Experts]) -> Iterator[Result]:
    yield from run_step(shapes, lora=True)


def run_trainer(shapes: Sequence[Experts]) -> Iterator[Result]:
    """``Trainer`` after ``enable_packing`` on the same rows, in full and with adapters."""
    for shape, lora in product(shapes, (False, True)):
        if wanted(TRAINER):
            yield from measure(shape.step(ROWS, lora), TRAINER, ROWS[0], epochs=1, repeat=1)
            torch._dynamo.reset()
            free()


def run_whole(shapes: Sequence[Experts]) -> Iterator[Result]:
    """All layers of gpt-oss-20b with adapters: the memory of one card."""
    for shape in shapes:
        if shape.name.startswith("gpt-oss"):
            racing = [replace(c, capacities=ROWS[:1]) for c in (RECOMPUTED, OURS)]
            yield from race(shape.step(ROWS, lora=True, whole=WHOLE_LAYERS), racing)
