"""float8 training: our bfloat16 step against our float8 steps, full fine-tuning of the Llama-3-8B shape.

    python -m benchmarks.gpu_float8 --match 'bfloat16|gw_hp'          # 16 layers, rows of 16,384 tokens: two minutes
    python -m benchmarks.gpu_float8 --budget 240                      # every recipe
    python -m benchmarks.gpu_float8 --layers 8 --memory selective --steps 20
    python -m benchmarks.gpu_float8 --tiny                            # every contender on the CPU, float8 emulated

Random weights in bfloat16, fused AdamW, ``make_train_step`` with compiled layers and a CUDA graph; every contender
starts from the same weights and trains the same rows, one a step. Documents are of 64 to 4,096 tokens. Tokens per
second count real ones. The loss after the last step may differ from that of bfloat16 by two percent; a contender that
is further off has no figure. The last lines compare each recipe with bfloat16. torchao is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.clock import TOY, StepClock, header
from benchmarks.harness import NOTE, Figures, measured, parsed, parser
from benchmarks.report import Result, collected, ratios
from benchmarks.shapes import config
from benchmarks.workload import RATE, random_model
from packing_core import pack
from torch_backend import PackedCollator, explain, make_train_step, patch
from torch_backend.hf import float8

ROW = 256 if TOY else 16_384
BASE = "bfloat16"
CONTENDERS = (BASE, "float8:rowwise_with_gw_hp", "float8:tensorwise", "float8:rowwise")
WARM_UP, OFF = 2 if TOY else 6, 0.02


@cache
def rows() -> list[dict[str, Any]]:
    """Full rows of documents of log-normal lengths, the same for every contender."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(6, 1, 12 if TOY else 300), *((8, 200) if TOY else (64, 4_096))).astype(int)
    documents = [generator.integers(4, 190 if TOY else 100_000, n) for n in lengths]
    packed, collate = pack(documents, ROW), PackedCollator(capacity=ROW)
    return [collate(packed[row : row + 1]) for row in range(len(packed) - 1)]


def train(precision: str, layers: int, memory: str, steps: int) -> Figures:
    """Returns the figures of a contender, and how its step runs."""
    model = random_model(config("Llama-3-8B", layers=layers), dtype=torch.bfloat16)
    patch(model.train(), verify=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    options: Any = {"memory": memory} | ({} if precision == BASE else {"precision": precision})
    step = make_train_step(model, optimizer, max_grad_norm=1.0, **options)
    batches, clock = rows(), StepClock(WARM_UP, steps)
    loss = float(clock.loop(step, cycle(batches))["loss"])
    tokens = [int((batch["labels"] != -100).sum()) + sum(map(len, batch["packed_documents"])) for batch in batches]
    notes = [f"{part} {what}" for part, what in step.parts.items()]
    notes += [note for note in explain(step).notes if "float8" in note]
    figures = {RATE: clock.in_timed(tokens) / clock.seconds, "ms per step": clock.ms, "GiB at most": clock.peak}
    return figures | {"last loss": loss, NOTE: "; ".join(notes)}


def run(layers: int, memory: str, steps: int) -> Iterator[Result]:
    section = f"float8, {'toy' if TOY else f'Llama-3-8B shape, {layers} layers'}, full fine-tuning"
    right: list[float] = []  # the loss of bfloat16

    def checked(precision: str) -> Figures:
        figures = train(precision, layers, memory, steps)
        loss = figures["last loss"]
        if precision == BASE:
            right.append(loss)
        if right and not abs(loss - right[0]) <= OFF * right[0]:
            raise ArithmeticError(f"loss {loss:.4f}, where bfloat16 has {right[0]:.4f}")
        return figures

    for contender in CONTENDERS:
        yield from measured(section, f"rows of {ROW:,}, memory={memory}", contender, RATE, partial(checked, contender))


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--memory", default="none", help="the level of memory, see make_train_step")
    options.add_argument("--steps", type=int, default=2 if TOY else 10, help="timed, after the warm-up")
    chosen = parsed(options, arguments)
    float8.EMULATED = TOY
    figures = run(chosen.layers, chosen.memory, chosen.steps)
    results = collected(figures, header(), chosen.output, "gpu_float8")
    print(ratios(results, RATE, [(recipe, BASE) for recipe in CONTENDERS[1:]]))
    return results


if __name__ == "__main__":
    main()
