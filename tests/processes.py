"""Processes that tests start end after 90 seconds, with every process that they started in turn."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

LIMIT = 90


def run(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit status; its output comes back as text.

    Raises:
        AssertionError: it ran for more than ``limit`` seconds, with the end of what it wrote.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # a pipe lives as long as any child
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                end([psutil.Process(process.pid)])
                process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    assert code is not None, f"{' '.join(command)} ran for more than {limit} seconds: {''.join(texts)[-3000:]}"
    return subprocess.CompletedProcess(command, code, *texts)


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
