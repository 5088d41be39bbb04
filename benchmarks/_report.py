"""The header of every benchmark: the machine, the versions, and a table."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


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


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are flush right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]

    def cells(line: Sequence[str]) -> str:
        return "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([cells(header), rule, *map(cells, lines)])


def best(repeat: int, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of ``repeat`` runs, by ``clock``."""
    times = []
    for _ in range(repeat):
        begin = clock()
        run()
        times.append(clock() - begin)
    return min(times)


def write_json(path: Path | None, found: dict[str, Any], begin: float) -> None:
    """Write what a benchmark found so far, and the seconds since ``begin``; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found | {"seconds": time.perf_counter() - begin}, indent=1))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
