"""Everything about speed on one GPU in one call of under ten minutes: attention, rotary embedding, the training step.

    python -m benchmarks.gpu                                # all of it
    python -m benchmarks.gpu --only attention rope          # some sections
    python -m benchmarks.gpu --output results               # where gpu.json and the charts go
    CROSSPACK_BENCH_QUICK=1 python -m benchmarks.gpu        # one small case of everything, to see that all of it runs

Nothing that fails its correctness check in the same run has a figure. Without a GPU it runs tiny, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks._report import machine, table, versions
from benchmarks.gpu_clock import TOY, Result, copy_bandwidth, matrix_rate

SECTIONS = {"attention": "benchmarks.gpu_attention", "rope": "benchmarks.gpu_rope", "step": "benchmarks.gpu_step"}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--output", type=Path, help="folder for gpu.json and the charts")
    chosen = options.parse_args(arguments)
    begin = time.perf_counter()
    print(header(), flush=True)
    results: list[Result] = []
    for name in chosen.only:
        section: Callable[[], Iterator[Result]] = import_module(SECTIONS[name]).run
        found = list(section())
        results += found
        for title in dict.fromkeys(r.section for r in found):
            print(f"\n{title}\n\n{as_table([r for r in found if r.section == title])}", flush=True)
        print(f"\n[{time.perf_counter() - begin:.0f} s]", flush=True)
        if chosen.output:
            write(chosen.output, results)
    return results


def header() -> str:
    device = "no GPU: tiny sizes, times mean nothing" if TOY else torch.cuda.get_device_name()
    packages = versions("torch", "triton", "transformers", "flash-attn-4", "xformers", "liger-kernel")
    ceilings = f"copy {copy_bandwidth() / 1e12:.2f} TB/s, bfloat16 products {matrix_rate() / 1e12:.0f} TFLOP/s"
    return f"{device}; {machine()}\n{packages}\nmeasured ceilings: {ceilings}"


def as_table(results: list[Result]) -> str:
    """Contenders as columns, cases and units as rows; below, the reasons of what has no figure."""
    contenders = list(dict.fromkeys(r.contender for r in results))
    rows = list(dict.fromkeys((r.case, r.unit) for r in results if r.value is not None))
    cells = {(r.case, r.unit, r.contender): r for r in results}

    def cell(case: str, unit: str, contender: str) -> str:
        found = cells.get((case, unit, contender))
        return (
            "-"
            if found is None or found.value is None
            else f"{found.value:,.3g}"
            if found.value < 100
            else f"{found.value:,.0f}"
        )

    lines = [[f"{case}, {unit}", *(cell(case, unit, c) for c in contenders)] for case, unit in rows]
    notes = [f"{r.case}, {r.contender}: {r.note}" for r in results if r.value is None]
    differences = [f"{r.case}, {r.contender}: {r.note}" for r in results if r.note.startswith("difference")]
    return "\n".join(
        [
            table(["", *contenders], lines),
            *(["", *notes] if notes else []),
            *(["", *differences] if differences else []),
        ]
    )


def write(folder: Path, results: list[Result]) -> None:
    """``gpu.json``, and one chart per section if matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"header": header().splitlines(), "results": [r.as_dict() for r in results]}
    (folder / "gpu.json").write_text(json.dumps(content, indent=1))
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no charts: matplotlib is not installed")
        return
    for title in dict.fromkeys(r.section for r in results):
        chart(pyplot, [r for r in results if r.section == title and r.value is not None], title, folder)


def chart(pyplot: object, results: list[Result], title: str, folder: Path) -> None:
    """Grouped bars, one panel per unit."""
    units = list(dict.fromkeys(r.unit for r in results))
    if not units:
        return
    figure, panels = pyplot.subplots(1, len(units), figsize=(7 * len(units), 4.5), squeeze=False)
    for unit, panel in zip(units, panels[0], strict=True):
        shown = [r for r in results if r.unit == unit]
        cases, contenders = (list(dict.fromkeys(x)) for x in ([r.case for r in shown], [r.contender for r in shown]))
        width = 0.8 / len(contenders)
        for i, contender in enumerate(contenders):
            values = {r.case: r.value for r in shown if r.contender == contender}
            panel.bar(
                [j + i * width for j in range(len(cases))], [values.get(c) or 0 for c in cases], width, label=contender
            )
        panel.set_xticks([j + 0.4 - width / 2 for j in range(len(cases))], cases, rotation=20, ha="right", fontsize=7)
        panel.set_title(f"{title}: {unit}", fontsize=9)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / f"gpu_{title.replace(', ', '_').replace(' ', '_')}.png", dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
