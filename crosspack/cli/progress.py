"""Progress of the console commands: bars on a terminal, and a plain line now and then where the output is piped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from crosspack.packing.unit import Outcome
from packing_core.training.records import StepRecord
from packing_core.training.schedule import Run

Item = TypeVar("Item")

LABELS: dict[Run, str] = {"padded": "padded", "grouped": "length-grouped", "packed": "packed"}
SECONDS = 10.0  # between two plain lines


class Ticker:
    """Says when the next plain line is due: ``wait`` seconds from now, and then every ``SECONDS``."""

    def __init__(self, wait: float = 0.0) -> None:
        self._due = time.monotonic() + wait

    def due(self) -> bool:
        """Returns whether a line is due; if so, schedules the next one."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + SECONDS
        return True


class TrainProgress:
    """Progress of each run: steps, speed, time left and last loss; moved by step records. A context manager."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._tasks: dict[Run, TaskID] = {}
        self._tickers: dict[Run, Ticker] = {}
        self._spent: dict[Run, tuple[int, float]] = {}
        self._progress = Progress(
            TextColumn("{task.description:>14}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:>16}"),
            TextColumn("{task.fields[loss]:>11}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            Remaining(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> TrainProgress:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are; what is printed next comes after them."""
        self._progress.stop()

    def step(self, record: StepRecord) -> None:
        """Move the bar of the record's run, or print a line if one is due."""
        run, done = record.run, record.step + 1
        tokens, seconds = self._spent.get(run, (0, 0.0))
        tokens, seconds = tokens + record.tokens, seconds + record.seconds
        self._spent[run] = tokens, seconds
        rate, loss = f"{tokens / seconds:,.0f} tokens/s", f"loss {record.loss:.4f}"
        if self._console.is_terminal:
            if run not in self._tasks:
                self._tasks[run] = self._progress.add_task(LABELS[run], total=self._steps, rate="", loss="")
            self._progress.update(self._tasks[run], completed=done, rate=rate, loss=loss)
        elif self._tickers.setdefault(run, Ticker()).due() or done == self._steps:
            self._console.print(f"{LABELS[run]}: step {done:,} of {self._steps:,}, {rate}, {loss}")
        if record.eval_loss is not None:
            self._console.print(f"after step {done:,}: evaluation loss {record.eval_loss:.4f}", style="dim")


class PackProgress:
    """Progress of packing and reading: documents/s, MB/s, tokens/s, efficiency so far and the time left.

    A bar on a terminal, else a line now and then; the same figures as lines of JSON in a log file.
    """

    def __init__(self, console: Console, size: int, capacity: int, log: Path | None) -> None:
        self._console, self._size, self._capacity, self._path = console, size, capacity, log
        self._log: IO[str] | None = None
        self._stack = ExitStack()
        self._ticker, self._logged = Ticker(SECONDS), Ticker()
        self._begin, self._before = time.monotonic(), Outcome(-1, -1)

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

    def begin(self, totals: Outcome) -> None:
        """Adds what was finished before; it does not count as speed."""
        self._begin, self._before = time.monotonic(), replace(totals)

    def update(self, totals: Outcome) -> None:
        """Show and log where the work is."""
        if self._log is not None and self._logged.due():
            now = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
            self._log.write(json.dumps(now | self.figures(totals)) + "\n")
        if self._console.is_terminal:
            self._bar.update(self._task, completed=totals.size, description=self._line(totals))
        elif self._ticker.due():
            self._console.print(self._line(totals))

    def figures(self, totals: Outcome) -> dict[str, Any]:
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

    def _line(self, totals: Outcome) -> str:
        now = self.figures(totals)
        left = timedelta(seconds=round(now["seconds_left"]))
        full = f", efficiency {now['efficiency']:.2%}" if totals.rows else ""
        return (
            f"{now['documents']:,} documents ({now['documents_per_second']:,.0f}/s), {now['megabytes_per_second']:.2f} "
            f"MB/s, {now['tokens_per_second']:,.0f} tokens/s{full}, {left} left"
        )


def counted(console: Console, what: str, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
    """The items, counted while they come: in one changing line on a terminal, elsewhere in a line now and then."""
    of = "" if total is None else f" of {total:,}"
    if console.is_terminal:
        bar = [] if total is None else [BarColumn()]
        columns = TextColumn("{task.description}"), *bar, TextColumn(f"{{task.completed:,}}{of}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(items, description=what, total=total or 0)
        return
    ticker = Ticker(SECONDS)
    for number, item in enumerate(items):
        if ticker.due():
            console.print(f"{what}: {number:,}{of}")
        yield item
