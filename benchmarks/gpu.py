"""Everything about speed on one GPU in one call of under ten minutes: the training step, attention, log-probabilities.

    python -m benchmarks.gpu                                # all sections but those that take minutes by themselves
    python -m benchmarks.gpu --only step attention          # some sections
    python -m benchmarks.gpu --output results               # where gpu.json goes
    python -m benchmarks.gpu --budget 240                   # seconds after which nothing is measured
    python -m benchmarks.gpu --only step --match captured   # some contenders
    python -m benchmarks.gpu --only options --match '^(?!flex)'   # all but flex, which compiles for minutes
    CROSSPACK_BENCH_QUICK=1 python -m benchmarks.gpu        # one small case of everything, to see that all of it runs

Each contender's figures are printed and written as it ends, the tables at the end. Nothing that fails its correctness
check in the same run has a figure. Without a GPU it runs tiny, to see that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from benchmarks.clock import header
from benchmarks.harness import in_turn, parsed, parser
from benchmarks.report import Result, collected

# name -> the generator of its results; in the order of importance
SECTIONS = {
    "step": "gpu_step:run",
    "attention": "gpu_attention:run",
    "logprobs": "gpu_vocabulary:run_logprobs",
    "wide": "gpu_attention:run_wide",
    "hybrid": "gpu_step:run_hybrid",
    "options": "gpu_attention:run_options",
    "distillation": "gpu_vocabulary:run_distillation",
}
BY_NAME_ONLY = ("options", "distillation")  # take minutes by themselves


def section(name: str) -> Callable[[], Iterator[Result]]:
    module, _, function = SECTIONS[name].partition(":")
    return lambda: getattr(import_module(f"benchmarks.{module}"), function)()


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__, [*SECTIONS], [name for name in SECTIONS if name not in BY_NAME_ONLY])
    chosen = parsed(options, arguments)
    results = in_turn(chosen.only, {name: section(name) for name in SECTIONS})
    return collected(results, header(), chosen.output, "gpu")


if __name__ == "__main__":
    main()
