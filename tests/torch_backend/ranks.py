"""Functions of test modules run on ranks: processes that stay up from call to call, and form a process group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.processes import LIMIT, end, run

ROOT = Path(__file__).parents[2]
DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="unsupported here: DeepSpeed is no dependency of any extra"
)
GRACE = 15  # seconds that ranks have to end a call in which another one failed
_SPAWN = multiprocessing.get_context("spawn")
_started: list[tuple[Any, Connection]] = []  # processes, of which a call takes the first ones
_group: dict[str, Any] = {}  # of the last call


class Raised(Exception):
    """All ranks raised; ``errors`` has the kind and the text of each one's."""

    def __init__(self, errors: list[str], trace: str) -> None:
        super().__init__(trace)
        self.errors = errors


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    backend: str = "gloo",
    limit: float = LIMIT,
    own: bool = False,
    **named: Any,
) -> Any:
    """Runs a function of a module on ranks, with one thread each, and returns what it returned on rank 0.

    The ranks are processes of this one that import once what functions need; calls on as many ranks share a process
    group. A call that changes its processes, as those of DeepSpeed, has them as its ``own``.

    Raises:
        Raised: the function raised on all ranks.
        AssertionError: on some of them alone, or it ran for more than ``limit`` seconds; all ranks are started anew.
    """
    if own:
        end_ranks()
    while len(_started) < ranks:
        pipe, its = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(its,), daemon=True)
        process.start()
        its.close()
        _started.append((process, pipe))
    if _group.get("of") != (ranks, backend):
        _group.update(of=(ranks, backend), file=f"{mkdtemp()}/store")
    pipes = [pipe for _, pipe in _started[:ranks]]
    try:
        call = pickle.dumps(partial(function, *args, **named))
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, ranks, backend, _group["file"], call))
        answers = _answers(pipes, limit)
        errors = [error for error, _ in answers if error]
        assert len(errors) in (0, ranks), f"some of {ranks} ranks failed: {_traces(answers)}"
    except BaseException:
        end_ranks()
        raise
    if own:
        end_ranks()
    if errors:
        raise Raised(errors, _traces(answers))
    return torch.load(BytesIO(answers[0][1]), weights_only=False)


def refused(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """Returns what a call raises, on every rank: so none waits for another."""
    with pytest.raises(Raised) as found:
        on_ranks(function, *args, **options)
    return found.value.errors


def everyones(value: Any) -> list[Any]:
    """Returns the values of all ranks, by rank; called on each of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def end_ranks() -> None:
    """Ends the processes, so that the next call starts others."""
    end([psutil.Process(process.pid) for process, _ in _started if process.is_alive()])
    for process, pipe in _started:
        process.join()
        pipe.close()
    _started.clear()
    _group.clear()


def torchrun(*command: str, ranks: int = 2, limit: float = LIMIT) -> str:
    """Run what follows the options of ``torchrun``, with one thread for each rank, and return what it printed.

    Raises:
        AssertionError: it failed, with the end of what it wrote, or ran for more than ``limit`` seconds.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    result = run([*launch, *command], env=environment, limit=limit)
    text = result.stdout + result.stderr
    assert result.returncode == 0, f"{Path(command[0]).name} ended with {result.returncode}: {text[-3000:]}"
    return text


def _answers(pipes: list[Connection], limit: float) -> list[tuple[str, Any]]:
    """Returns of every rank the text of an error, or none, and its traceback or what it returned."""
    found: dict[Any, tuple[str, Any]] = {}
    stop = time.monotonic() + limit
    while len(found) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in found], max(stop - time.monotonic(), 0))
        assert ready, f"{len(pipes) - len(found)} ranks ran for more than {limit} s: {_traces(list(found.values()))}"
        for pipe in ready:
            try:
                found[pipe] = pipe.recv()
            except EOFError:
                found[pipe] = ("EOFError: a rank ended", "a rank ended")
            if found[pipe][0]:
                stop = min(stop, time.monotonic() + GRACE)
    return [found[pipe] for pipe in pipes]


def _traces(answers: list[tuple[str, Any]]) -> str:
    return "\n".join(trace[-3000:] for error, trace in answers if error)


def _serve(pipe: Connection) -> None:
    """Runs what is sent, for as long as the process that sends it lives."""
    import_module("tests.conftest")  # makes Triton interpretable
    import_module("torch.distributed.nn.functional")  # its functions default to the group that there is at its import
    torch.set_num_threads(1)
    group = ""
    while True:
        try:
            rank, ranks, backend, file, call = pipe.recv()
        except EOFError:
            os._exit(0)  # without waiting for gloo's threads, which can hang
        stock = dict(os.environ)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        try:
            if file != group:
                if dist.is_initialized():
                    dist.destroy_process_group()
                if backend == "nccl":
                    torch.cuda.set_device(rank)
                minute = timedelta(minutes=1)
                dist.init_process_group(backend, f"file://{file}", minute, world_size=ranks, rank=rank)
                group = file
            found = pickle.loads(call)()
            saved = BytesIO()
            torch.save(found if rank == 0 else None, saved)
            answer = "", saved.getvalue()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}", traceback.format_exc()
        os.environ.clear()
        os.environ |= stock
        _forget()
        pipe.send(answer)


def _forget() -> None:
    """Lets a call begin as in a fresh process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
