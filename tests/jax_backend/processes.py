"""Starts a script of this folder in several processes of one `jax.distributed` job, and ends them after 90 seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parents[2]
LIMIT = 90


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
    with ExitStack() as files:
        outputs = [files.enter_context(TemporaryFile("w+")) for _ in range(count)]  # a pipe could fill up and block
        processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), address, str(count), str(number), *arguments],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for number, output in enumerate(outputs)
        ]
        end = time.monotonic() + LIMIT
        try:
            codes = [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]
            found = f"{script} ended with {codes}"
        except subprocess.TimeoutExpired:
            codes, found = [1], f"{script} ran for more than {LIMIT} seconds"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for output in outputs:
            output.seek(0)
            found += f"\n{output.read()[-2000:]}"
    assert not any(codes), found
