"""Processes that tests start end after 90 seconds, with every process that they started in turn."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

LIMIT = 180


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one command; see :func:`run_together`."""
    (done,) = run_together([command], **options)
    return done


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit: float = LIMIT,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time to their ends, whatever their exit statuses; their output comes back as text.

    Raises:
        AssertionError: one ran for more than ``limit`` seconds, with the end of what it wrote.
    """
    with ExitStack() as stack:
        # Files and not pipes: a pipe stays open as long as any child lives, and blocks when it is full.
        outputs = [stack.enter_context(TemporaryFile("w+")) for _ in commands]
        errors = [stack.enter_context(TemporaryFile("w+")) for _ in commands]
        started = [
            subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, start_new_session=True)
            for command, out, err in zip(commands, outputs, errors, strict=True)
        ]
        stop = time.monotonic() + limit
        try:
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(stop - time.monotonic(), 0))
            late = [process.poll() is None for process in started]
        finally:
            end([psutil.Process(process.pid) for process in started if process.poll() is None])
        done = [
            subprocess.CompletedProcess(command, process.wait(), _text(out), _text(err))
            for command, process, out, err in zip(commands, started, outputs, errors, strict=True)
        ]
    for each, is_late in zip(done, late, strict=True):
        written = (each.stdout + each.stderr)[-3000:]
        assert not is_late, f"{' '.join(each.args)} ran for more than {limit} seconds: {written}"
    return done


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes with all their descendants: those may have sessions of their own, as torchrun's ranks do."""
    for process in processes:
        with_children = [process]
        try:
            with_children += process.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        for each in with_children:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def forked(work: Callable[[], int]) -> int:
    """Run ``work`` in a copy of this process; its exit status, or minus the signal that ended it.

    The copy starts workers by a fork server of its own, if it does: those of this process's would not end with it.
    """
    child = os.fork()
    if not child:
        try:
            signal.alarm(LIMIT)
            forkserver._forkserver.__init__()  # type: ignore[misc]  # as if none had been started
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_when(command: Sequence[str], ready: Callable[[], bool]) -> bool:
    """Kill a command, and not its children, as soon as ``ready``; whether its children end by themselves."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    stop = time.monotonic() + LIMIT
    children: list[psutil.Process] = []
    try:
        while not ready() and time.monotonic() < stop:
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        return bool(children) and not psutil.wait_procs(children, max(stop - time.monotonic(), 0))[1]
    finally:
        process.kill()
        end(children)


@contextmanager
def limited(limit: float = LIMIT) -> Iterator[None]:
    """Around code that starts worker processes and waits for them, as loaders and pools do.

    Raises:
        AssertionError: the code ran for more than ``limit`` seconds; the processes that it had started are killed.
    """
    before = set(psutil.Process().children())

    def stop(*_: Any) -> None:
        end([process for process in psutil.Process().children() if process not in before])
        raise AssertionError(f"worker processes took more than {limit} seconds")  # an OSError would be caught by join()

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
