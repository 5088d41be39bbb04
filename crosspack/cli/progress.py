"""Progress of the console commands: bars on a terminal, and a plain line now and then where the output is piped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
