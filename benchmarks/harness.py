"""The harness of all benchmarks: contenders are measured side by side, each checked before, and reported.

    options = parser(__doc__)                                    # --match, --budget, --limit, --output, --tiny
    chosen = parsed(options, arguments)
    collected(measured(section, case, name, unit, measure, check, limit), about, chosen.output, name)

A contender is a name, a check (its error against a reference) and a measurement (its figures by unit). One that fails,
is wrong, takes too long or comes after the end of the budget has no figure, and the report says why. No framework is
imported here.
"""

from __future__ import annotations

import argparse
import gc
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import print_exc
from typing import Any

from benchmarks.report import Result

NOTE = "note"  # among figures: what else the report says of a contender
Figures = Mapping[str, Any]  # unit -> value
_deadline = _limit = float("inf")
_match = re.compile("")


def parser(about: str | None, sections: Sequence[str] = (), default: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns the options that all benchmarks have.

    Args:
        sections: what ``--only`` may name; none if there is no such option.
        default: those that run without it; all if empty.
    """
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sections:
        options.add_argument("--only", nargs="+", choices=list(sections), default=list(default or sections))
    options.add_argument("--match", default="", metavar="PATTERN", help="only contenders whose name it matches")
    options.add_argument("--budget", type=float, metavar="SECONDS", help="measure nothing after that")
    options.add_argument("--limit", type=float, metavar="SECONDS", help="the most that a contender may take")
    options.add_argument("--output", type=Path, help="folder for the figures as JSON")
    options.add_argument("--tiny", action="store_true", help="a toy on the CPU, to see that everything runs")
    return options


def parsed(options: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the chosen options; the pattern, the budget and the limit hold from now on."""
    global _match, _deadline, _limit
    chosen = options.parse_args(arguments)
    _match, _limit = re.compile(chosen.match), chosen.limit or float("inf")
    _deadline = time.perf_counter() + (chosen.budget or float("inf"))
    return chosen


def wanted(contender: str) -> bool:
    """Returns whether ``--match`` matches the name somewhere."""
    return _match.search(contender) is not None


def seconds_left() -> float:
    """Returns what a contender that begins now may take."""
    return min(_limit, _deadline - time.perf_counter())


def in_turn(sections: Sequence[str], table: Mapping[str, Callable[..., Iterator[Result]]], *arguments: Any) -> Any:
    """Yields the results of sections; what ends one is a result too, and the others still have their turn."""
    for name in sections:
        try:
            yield from table[name](*arguments)
        except Exception as failure:
            print_exc()
            yield Result(name, "the rest", "everything", None, "", reason(failure))


def measured(
    section: str,
    case: str,
    contender: str,
    unit: str,
    measure: Callable[[], Figures],
    check: Callable[[], float] | None = None,
    limit: float | Callable[[], float] = 0.0,
) -> Iterator[Result]:
    """Yields the figures of a contender that is wanted, or why it has none.

    Args:
        unit: of the line of a contender without figures.
        measure: the figures by unit, and what else is to be said under ``NOTE``.
        check: the error of the contender, which is measured if it is at most ``limit``.
    """
    if not wanted(contender):
        return
    figures, note = _gated(measure, check, limit)
    free()
    figures = dict(figures)
    note = "; ".join(filter(None, (note, figures.pop(NOTE, ""))))
    for name, value in (figures or {unit: None}).items():
        yield Result(section, case, contender, value, name, note)


def _gated(
    measure: Callable[[], Figures], check: Callable[[], float] | None, limit: float | Callable[[], float]
) -> tuple[Figures, str]:
    if seconds_left() < 0:
        return {}, "not run: out of time"
    try:
        with _interrupted_after(seconds_left()):
            if check is None:
                return measure(), ""
            allowed = limit() if callable(limit) else limit
            error = check()
            if not error <= allowed:
                return {}, f"WRONG: error {error:.1e}, where {allowed:.1e} is allowed"
            return measure(), f"error {error:.1e}"
    except Exception as failure:  # a contender that fails is a line in the table
        print_exc()
        return {}, reason(failure)


def reason(failure: Exception) -> str:
    """Says in one line why a contender has no figures."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [""]
    # "backend='inductor' raised:" says nothing yet
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(failure).__name__}: {text[:160]}"


def free() -> None:
    """Gives memory of contenders that are gone back to the GPU."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the code of the block after ``seconds``, and again if that code goes on."""
    if seconds == float("inf"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
