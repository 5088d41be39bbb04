"""Progress bars of the console commands: how far, how fast, how long still, and the last loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from packing_core.training.job import StepRecord
from packing_core.training.schedule import Run

Item = TypeVar("Item")

LABELS: dict[Run, str] = {"padded": "padded", "grouped": "length-grouped", "packed": "packed"}


class TrainProgress:
    """One bar per run, moved by step records; a context manager."""

    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        self._tasks: dict[Run, TaskID] = {}
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
        )

    def __enter__(self) -> TrainProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def phase(self, line: str) -> None:
        """Print what is being done that is not a step."""
        self._progress.console.print(line, style="dim")

    def step(self, record: StepRecord) -> None:
        """Move the bar of the record's run."""
        tokens, seconds = self._spent.get(record.run, (0, 0.0))
        tokens, seconds = tokens + record.tokens, seconds + record.seconds
        self._spent[record.run] = tokens, seconds
        if record.run not in self._tasks:
            self._tasks[record.run] = self._progress.add_task(LABELS[record.run], total=self._steps, rate="", loss="")
        self._progress.update(
            self._tasks[record.run],
            completed=record.step + 1,
            rate=f"{tokens / seconds:,.0f} tokens/s",
            loss=f"loss {record.loss:.4f}",
        )


def counted(console: Console, what: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items, with a line that counts them while they come, on a terminal."""
    with Progress(
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield from progress.track(items, description=what, total=0)
