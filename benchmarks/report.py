"""Reports of benchmarks: the machine, the versions, a line for each figure as it comes, and tables at the end."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """One measured figure, or the reason there is none.

    Attributes:
        section, case, contender: what was measured; what ran.
        value, unit: the figure; None if the contender failed or was wrong.
        note: error against the reference, or what went wrong.
    """

    section: str
    case: str
    contender: str
    value: float | None
    unit: str
    note: str = ""


def collected(results: Iterable[Result], about: str, output: Path | None, name: str) -> list[Result]:
    """Prints each figure as it comes, a line per contender; writes all so far to ``NAME.json``; then prints tables.

    Args:
        about: the lines above: machine and versions.
        output: a folder; None writes nothing.
    """
    begin, seen = time.perf_counter(), list[Result]()
    print(about, end="", flush=True)
    line, notes = None, set[str]()
    for result in results:
        seen.append(result)
        if line != (line := (result.section, result.case, result.contender)):
            notes = set()
            print(f"\n[{time.perf_counter() - begin:3.0f} s] {', '.join(line)}:", end="")
        figures = [] if result.value is None else [f"{figure(result.value)} {result.unit}"]
        new = [] if result.note in notes | {""} else [result.note]
        notes.add(result.note)
        print("", *(f"{part};" for part in (*figures, *new)), end="", flush=True)
        write_json(output and output / f"{name}.json", {"header": about.splitlines(), "results": [*map(asdict, seen)]})
    print()
    for title in dict.fromkeys(r.section for r in seen):
        print(f"\n{title}\n\n{as_table([r for r in seen if r.section == title])}", flush=True)
    return seen


def ratios(
    results: Sequence[Result],
    unit: str,
    pairs: Iterable[tuple[Any, Any]],
    name: Callable[[Result], Any] = lambda result: result.contender,
) -> str:
    """Returns a line for each pair of names whose figures are there: how many times the second one the first one is."""
    figures = {name(r): r.value for r in results if r.value and r.unit == unit}
    both = [(x, y) for x, y in pairs if x in figures and y in figures]
    return "\n".join(f"{_words(x)}: {figures[x] / figures[y]:.2f} times {_words(y)}" for x, y in both)


def _words(name: Any) -> str:
    return name if isinstance(name, str) else ", ".join(name)


def figure(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def as_table(results: list[Result]) -> str:
    """Contenders as lines, units as columns, where each has several; else cases as lines and contenders as columns."""
    with_figure = [r for r in results if r.value is not None]
    if not with_figure:
        return "\n".join(f"{note}: {count} cases" for note, count in Counter(r.note for r in results).items())
    units = list(dict.fromkeys(r.unit for r in with_figure))
    cells = {(r.case, r.contender, r.unit): figure(r.value) for r in with_figure if r.value is not None}
    if len(units) > 3:
        header = ["", "", *units]
        pairs = dict.fromkeys((r.case, r.contender) for r in with_figure)
        lines = [[case, name, *(cells.get((case, name, unit), "-") for unit in units)] for case, name in pairs]
    else:
        names = list(dict.fromkeys(r.contender for r in with_figure))
        rows = dict.fromkeys((r.case, r.unit) for r in with_figure)
        header = ["", *names]
        lines = [[f"{case}, {unit}", *(cells.get((case, name, unit), "-") for name in names)] for case, unit in rows]
    notes = dict.fromkeys(f"{r.case}, {r.contender}: {r.note}" for r in results if r.value is None)
    return "\n".join([table(header, lines), *(["", *notes] if notes else [])])


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are flush right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]

    def cells(line: Sequence[str]) -> str:
        return "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([cells(header), rule, *map(cells, lines)])


def machine() -> str:
    """One line: processor, cores this process may use, system and Python."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu}, {cores} cores, {platform.system()}, Python {platform.python_version()}"


def versions(*distributions: str) -> str:
    """One line: each distribution with its version, or that it is not installed."""
    return ", ".join(f"{name} {_version(name) or 'not installed'}" for name in distributions)


def best(repeat: int, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of ``repeat`` runs, by ``clock``."""
    times = []
    for _ in range(repeat):
        begin = clock()
        run()
        times.append(clock() - begin)
    return min(times)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Writes a file that is whole at every moment; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".new")
        written.write_text(json.dumps(content, indent=1))
        written.replace(path)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
