"""Starts a script of this folder in several processes of one `jax.distributed` job."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parents[2]


def run_processes(script: str, *arguments: str, count: int = 2, devices: int = 2) -> None:
    """Run ``script ADDRESS COUNT NUMBER *arguments`` in ``count`` processes of ``devices`` CPU devices each.

    Raises:
        AssertionError: one failed, with the end of what it wrote, or ran for more than 90 seconds.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    path = str(Path(__file__).with_name(script))
    commands = [[sys.executable, path, address, str(count), str(number), *arguments] for number in range(count)]
    for done in processes.run_together(commands, env=environment):
        assert done.returncode == 0, f"{script} ended with {done.returncode}: {done.stderr[-2000:]}"
