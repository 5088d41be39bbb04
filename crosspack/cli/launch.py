"""Several processes of one command: ``--nproc N`` starts them here, ``torchrun`` starts them by itself.

Both say to each process which rank it is by the environment variables that ``torch.distributed`` reads. Rank 0 prints
and writes; the others compute.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from crosspack.cli.runfile import RUN_FILE

WORLD, RANK = "WORLD_SIZE", "RANK"
_PATIENCE = 10.0  # seconds that processes have to end after another one failed


def world_size() -> int:
    """Returns the number of processes that this one is started with."""
    return int(os.environ.get(WORLD, "1"))


def ranks_here() -> int:
    """Returns how many of these processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get(RANK, "0"))


def restarted() -> bool:
    """Returns whether torchrun started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def start_again(context: typer.Context, run_file: str) -> int:
    """Runs a command with the same options as ``--nproc`` processes; returns the exit status."""
    given = context.params
    with TemporaryDirectory() as folder:
        path = Path(folder, RUN_FILE)
        path.write_text(run_file)
        chosen = [f"--{flag}" for flag in ("resume", "overwrite", "verbose", "quiet") if given[flag]]
        chosen += ["--json"] * given["as_json"]
        return start(given["nproc"], [str(context.info_name), "--config", str(path), *chosen])


def start(processes: int, arguments: Sequence[str]) -> int:
    """Run ``crosspack`` with these arguments as several ranks of this machine; the first failure ends all.

    Returns:
        The exit status of the command: 0, or that of the process that failed first.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, WORLD: str(processes)}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // processes))
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "crosspack", *arguments],
            env={**os.environ, **shared, RANK: str(n), "LOCAL_RANK": str(n), "OMP_NUM_THREADS": threads},
        )
        for n in range(processes)
    ]
    try:
        while True:
            ended = [process.poll() for process in running]
            failed = next((status for status in ended if status), 0)
            if failed or None not in ended:
                return failed
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
