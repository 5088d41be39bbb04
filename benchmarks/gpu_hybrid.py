"""The whole training step of a hybrid: the Qwen3.5 shape, 8 layers of which 6 scan, rows of 16,384 tokens, mean 243.

    python -m benchmarks.gpu --only hybrid              # ours, and what the installed peers do as they are found
    python -m benchmarks.gpu_hybrid --profile           # the kernels of one captured step, by time

Peers are transformers with what is installed: ``fla`` scans if it is there, plain torch otherwise. A contender that
raises, or whose gradients are those of contaminated documents, has no figure and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu import collected, parsed, parser
from benchmarks.gpu_clock import TOY, Result
from benchmarks.gpu_profile import Profile
from benchmarks.gpu_step import Contender, ours_alone, ours_compiled, prepared, race, stock, without_fla
from benchmarks.gpu_workload import Shape, qwen35

SHAPE = Shape("Qwen3.5 hybrid, 8 layers", qwen35, (256,) if TOY else (16_384,), steps=2 if TOY else 8)
COMPILED = Contender("ours, compiled and captured", ours_compiled, "fixed", captured=True)
CONTENDERS = [
    COMPILED,
    Contender("ours, captured", ours_alone, "fixed", captured=True),
    Contender("ours", ours_alone),
    Contender("stock packed: SDPA, metadata", stock, "stock"),
    Contender("padded, SDPA, scan as installed", stock, "padded"),
    Contender("padded, SDPA, scan in plain torch", without_fla(stock), "padded"),
]


def run() -> Iterator[Result]:
    for contender in CONTENDERS:
        # What scans in plain torch takes seconds a step.
        slow = contender not in CONTENDERS[:3]
        yield from race(replace(SHAPE, steps=2) if slow else SHAPE, [contender])


def profile(contender: Contender = COMPILED) -> str:
    """The kernels of one step, the longest first."""
    step, timed, _ = prepared(SHAPE, contender, SHAPE.capacities[0])
    for i in range(6):
        step(timed[i % len(timed)])
    seen = Profile()
    seen.start()
    step(timed[0])
    seen.stop()
    return f"{contender.name}\n\n{seen.report(steps=1)}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--profile", action="store_true", help="the kernels of one step in place of its speed")
    chosen = parsed(options, None)
    if chosen.profile:
        print(profile(), flush=True)
    else:
        collected(run(), chosen.output)


if __name__ == "__main__":
    main()
