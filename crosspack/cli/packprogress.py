"""Progress of ``crosspack pack`` and ``report``: documents/s, MB/s, tokens/s, efficiency so far and the time left."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from crosspack.cli.progress import SECONDS, Ticker
from crosspack.packing.run import Totals


class PackProgress:
    """A bar on a terminal, else a line now and then; the same figures as lines of JSON in a log file."""

    def __init__(self, console: Console, size: int, capacity: int, log: Path | None) -> None:
        self._console = console
        self._size = size
        self._capacity = capacity
        self._log: IO[str] | None = None
        self._path = log
        self._stack = ExitStack()
        self._ticker, self._logged = Ticker(SECONDS), Ticker()
        self._begin, self._before = time.monotonic(), Totals()

    def __enter__(self) -> PackProgress:
        if self._path is not None:
            self._log = self._stack.enter_context(open(self._path, "a", buffering=1))
        if self._console.is_terminal:
            columns = BarColumn(), TextColumn("{task.description}")
            self._bar = self._stack.enter_context(Progress(*columns, console=self._console, transient=True))
            self._task = self._bar.add_task("", total=self._size or None)
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def begin(self, totals: Totals) -> None:
        """Adds what was finished before; it does not count as speed."""
        self._begin, self._before = time.monotonic(), replace(totals)

    def update(self, totals: Totals) -> None:
        """Show and log where the work is."""
        if self._log is not None and self._logged.due():
            now = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
            self._log.write(json.dumps(now | self.figures(totals)) + "\n")
        if self._console.is_terminal:
            self._bar.update(self._task, completed=totals.size, description=self._line(totals))
        elif self._ticker.due():
            self._console.print(self._line(totals))

    def figures(self, totals: Totals) -> dict[str, Any]:
        """Counts so far, and rates since the run began or went on."""
        before, seconds = self._before, max(time.monotonic() - self._begin, 1e-9)
        tokens, old = totals.tokens + totals.left_tokens, before.tokens + before.left_tokens
        rate = (totals.size - before.size) / seconds
        left = (self._size - totals.size) / rate if self._size > totals.size and rate else 0.0
        return {
            "documents": totals.documents,
            "tokens": tokens,
            "megabytes": totals.size / 1e6,
            "documents_per_second": (totals.documents - before.documents) / seconds,
            "megabytes_per_second": rate / 1e6,
            "tokens_per_second": (tokens - old) / seconds,
            "efficiency": totals.tokens / (totals.rows * self._capacity) if totals.rows else 0.0,
            "seconds_left": left,
        }

    def _line(self, totals: Totals) -> str:
        now = self.figures(totals)
        left = timedelta(seconds=round(now["seconds_left"]))
        full = f", efficiency {now['efficiency']:.2%}" if totals.rows else ""
        return (
            f"{now['documents']:,} documents ({now['documents_per_second']:,.0f}/s), {now['megabytes_per_second']:.2f} "
            f"MB/s, {now['tokens_per_second']:,.0f} tokens/s{full}, {left} left"
        )
