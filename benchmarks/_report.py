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


def fastest(run: Callable[[], Any], rounds: int, wait: Callable[[Any], object], seconds: float = 0.05) -> float:
    """Milliseconds of a call that a device runs, the best of several rounds of back-to-back calls.

    Args:
        run: the call; its first one compiles and is not timed.
        rounds: each of about ``seconds``. Of a call that takes longer than that there are two rounds of one call.
        wait: blocks until the device has ended what a call returned.
    """
    wait(run())
    begin = time.perf_counter()
    wait(run())
    best = first = time.perf_counter() - begin
    calls = max(1, min(200, int(seconds / first)))
    for _ in range(rounds if first < seconds else 2):
        begin = time.perf_counter()
        for _ in range(calls):
            last = run()
        wait(last)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best * 1e3


def not_run(error: Exception) -> str:
    """Says in one line why a contender has no figures."""
    reason = str(error).strip().splitlines()[:1]
    return f"NOT RUN: {type(error).__name__}: {''.join(reason)[:120]}"


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
