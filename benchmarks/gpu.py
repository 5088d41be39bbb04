"""Everything about speed on one GPU in one call of under ten minutes: the training step, rotary embedding, attention.

    python -m benchmarks.gpu                                # all sections but those that take minutes by themselves
    python -m benchmarks.gpu --only step rope               # some sections
    python -m benchmarks.gpu --output results               # where gpu.json goes
    python -m benchmarks.gpu --budget 240                   # seconds after which nothing new is begun
    python -m benchmarks.gpu --only step --match captured   # some contenders
    python -m benchmarks.gpu --only options --match '^(?!flex)'   # all but flex, which compiles for minutes
    CROSSPACK_BENCH_QUICK=1 python -m benchmarks.gpu        # one small case of everything, to see that all of it runs

Each contender's figures are printed and written as it ends, the tables at the end. Nothing that fails its correctness
check in the same run has a figure. Without a GPU it runs tiny, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from traceback import print_exc

import torch

from benchmarks._report import machine, table, versions
from benchmarks.gpu_clock import TOY, Result, copy_bandwidth, failed, matrix_rate, set_budget, set_match

# name -> the generator of its results; in the order of importance
SECTIONS = {
    "step": "benchmarks.gpu_step:run",
    "rope": "benchmarks.gpu_rope:run",
    "attention": "benchmarks.gpu_attention:run",
    "logprobs": "benchmarks.gpu_logprobs:run",
    "wide": "benchmarks.gpu_attention:run_wide",
    "others": "benchmarks.gpu_step:run_others",
    "hybrid": "benchmarks.gpu_step:run_hybrid",
    "options": "benchmarks.gpu_options:run",
    "moe": "benchmarks.gpu_moe:run",
    "distillation": "benchmarks.gpu_distillation:run",
    "float8": "benchmarks.gpu_float8:run",
    "sparse": "benchmarks.gpu_sparse:run_step",
    "audio": "benchmarks.gpu_audio:run",
}
BY_NAME_ONLY = {"options", "moe", "distillation", "float8", "sparse", "audio"}  # take minutes by themselves


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=[x for x in SECTIONS if x not in BY_NAME_ONLY])
    chosen = parsed(options, arguments)
    return collected((found for name in chosen.only for found in _section(name)), chosen.output)


def _section(name: str) -> Iterator[Result]:
    module, _, function = SECTIONS[name].partition(":")
    return survived(name, getattr(import_module(module), function)())


# -- of every GPU benchmark --------------------------------------------------------------------------------------------


def parser(about: str | None) -> argparse.ArgumentParser:
    """Returns the options that all GPU benchmarks have."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--match", default="", metavar="PATTERN", help="only contenders whose name it matches")
    options.add_argument("--budget", type=float, metavar="SECONDS", help="begin nothing new after that")
    options.add_argument("--output", type=Path, help="folder for the figures as JSON")
    options.add_argument("--tiny", action="store_true", help="a toy on the CPU, to see that everything runs")
    return options


def parsed(options: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The chosen options; the pattern and the budget hold from now on."""
    chosen = options.parse_args(arguments)
    set_match(chosen.match)
    if chosen.budget:
        set_budget(chosen.budget)
    return chosen


def collected(found: Iterable[Result], output: Path | None, name: str = "gpu") -> list[Result]:
    """Prints each figure as it comes, a line per contender; writes all so far to ``NAME.json``; then prints tables."""
    begin, about, results = time.perf_counter(), header(), list[Result]()
    print(about, end="", flush=True)
    line, notes = None, set[str]()
    for result in found:
        results.append(result)
        if line != (line := (result.section, result.case, result.contender)):
            notes = set()
            print(f"\n[{time.perf_counter() - begin:3.0f} s] {', '.join(line)}:", end="")
        figures = [] if result.value is None else [f"{figure(result.value)} {result.unit}"]
        new = [] if result.note in notes | {""} else [result.note]
        notes.add(result.note)
        print("", *(f"{part};" for part in (*figures, *new)), end="", flush=True)
        if output:
            write(output, about, results, name)
    print()
    for title in dict.fromkeys(r.section for r in results):
        print(f"\n{title}\n\n{as_table([r for r in results if r.section == title])}", flush=True)
    return results


def survived(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The results up to what ended the section, which is a result too: the others still have their turn."""
    try:
        yield from results
    except Exception as failure:
        print_exc()
        yield failed(name, "the rest", "everything", "", failure)


def header() -> str:
    device = "no GPU: tiny sizes, times mean nothing" if TOY else torch.cuda.get_device_name()
    packages = versions("torch", "triton", "transformers", "flash-attn-4", "xformers", "liger-kernel")
    ceilings = f"copy {copy_bandwidth() / 1e12:.2f} TB/s, bfloat16 products {matrix_rate() / 1e12:.0f} TFLOP/s"
    return f"{device}; {machine()}\n{packages}\nmeasured ceilings: {ceilings}"


def figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def as_table(results: list[Result]) -> str:
    """Contenders as lines, units as columns, where each has several; else cases as lines and contenders as columns."""
    with_figure = [r for r in results if r.value is not None]
    if not with_figure:
        return "\n".join(f"{note}: {count} cases" for note, count in Counter(r.note for r in results).items())
    units = list(dict.fromkeys(r.unit for r in with_figure))
    cells = {(r.case, r.contender, r.unit): figure(r.value) for r in with_figure}
    if len(units) > 3:
        lines = list(dict.fromkeys((r.case, r.contender) for r in with_figure))
        content = table(
            ["", "", *units],
            [[case, name, *(cells.get((case, name, unit), "-") for unit in units)] for case, name in lines],
        )
    else:
        names = list(dict.fromkeys(r.contender for r in with_figure))
        rows = list(dict.fromkeys((r.case, r.unit) for r in with_figure))
        content = table(
            ["", *names],
            [[f"{case}, {unit}", *(cells.get((case, name, unit), "-") for name in names)] for case, unit in rows],
        )
    notes = dict.fromkeys(
        f"{r.case}, {r.contender}: {r.note}" for r in results if r.value is None or r.note.startswith("difference")
    )
    return "\n".join([content, *(["", *notes] if notes else [])])


def write(folder: Path, about: str, results: list[Result], name: str) -> None:
    """``NAME.json``, whole at every moment."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"header": about.splitlines(), "results": [r.as_dict() for r in results]}
    written = folder / f"{name}.json.new"
    written.write_text(json.dumps(content, indent=1))
    written.replace(folder / f"{name}.json")


if __name__ == "__main__":
    main()
