"""Processes that run jobs: a job goes in, results come out one by one, in any order.

Each worker has a pipe of its own, so one that dies, out of memory say, is noticed at once. A worker whose parent
is killed ends at once too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from packing_core.errors import PackingError, first_line

Job = Any
_KILLED = (
    "a worker process was killed, probably out of memory: pass fewer --workers; the same command goes on where "
    "this one stopped"
)
Work = Callable[[Job], Iterator[Any]]


@dataclass(frozen=True)
class Failed:
    """A job raised this."""

    error: Exception


class Finished:
    """A job has no more results."""


class Pool(ABC):
    """Runs jobs, the earlier ones first."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()  # those that wait

    def submit(self, job: Job) -> None:
        """Add a job."""
        self._jobs.append(job)

    def forget(self, unwanted: Callable[[Job], bool]) -> None:
        """Drop jobs that wait."""
        self._jobs = deque(job for job in self._jobs if not unwanted(job))

    @abstractmethod
    def results(self) -> Iterator[tuple[Job, Any]]:
        """Jobs with each result, at last Finished or Failed, until no job is left. Jobs may be added meanwhile."""


class Inline(Pool):
    """Runs jobs in this process."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def results(self) -> Iterator[tuple[Job, Any]]:
        while self._jobs:
            job = self._jobs.popleft()
            yield from ((job, result) for result in results_of(self._work, job))


class Processes(Pool):
    """Runs jobs in processes of their own; a context manager that ends them.

    Args:
        work: runs a job; it is pickled once for each process.
    """

    def __init__(self, work: Work, count: int) -> None:
        super().__init__()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["crosspack.packing.warm"])
        self._busy: dict[Connection, Job] = {}
        self._idle: list[Connection] = []
        self._processes: list[BaseProcess] = []
        pickled = pickle.dumps(work)
        try:
            for _ in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, pickled), daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._idle.append(here)
        except (OSError, EOFError) as error:  # too many processes or open files, or the server of workers is dead
            self.__exit__()
            raise PackingError(
                f"a worker process could not be started ({first_line(error)}): pass fewer --workers"
            ) from error

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *raised: object) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def results(self) -> Iterator[tuple[Job, Any]]:
        while self._jobs or self._busy:
            while self._jobs and self._idle:
                connection, job = self._idle.pop(), self._jobs.popleft()
                self._busy[connection] = job
                try:
                    connection.send(job)
                except OSError:
                    raise PackingError(_KILLED) from None
            for ready in wait(list(self._busy)):
                assert isinstance(ready, Connection)
                connection = ready
                job = self._busy[connection]
                try:
                    result = connection.recv()
                except (EOFError, OSError):
                    raise PackingError(_KILLED) from None
                if isinstance(result, Failed | Finished):
                    self._idle.append(connection)
                    del self._busy[connection]
                yield job, result


def _serve(connection: Connection, pickled: bytes) -> None:
    """The life of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work = _unpickled(pickled)
        while True:
            for result in results_of(work, connection.recv()):
                connection.send(result)
    except (EOFError, OSError, KeyboardInterrupt):  # the parent is gone, or is stopping
        pass


def _unpickled(pickled: bytes) -> Work:
    """The work of a process; where it cannot be read, one that says why of every job."""
    try:
        work: Work = pickle.loads(pickled)
        return work
    except Exception as error:  # of whatever package is missing or of another version there
        reason = f"a worker process could not begin: {first_line(error)}"

    def refuse(job: Job) -> Iterator[Any]:
        raise PackingError(reason)

    return refuse


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def results_of(work: Work, job: Job) -> Iterator[Any]:
    """The results of a job, then Finished, or Failed with what it raised."""
    try:
        yield from work(job)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # another library's class, which takes other arguments
            error = RuntimeError(f"{type(error).__name__}: {first_line(error)}")
        yield Failed(error)
    else:
        yield Finished()
