"""Runs a contender of a benchmark in processes of its own, which torchrun starts and a time limit ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_clock import TOY, free


def launch(
    module: str, ranks: int, contender: Mapping[str, Any], arguments: Sequence[str], limit: float
) -> tuple[dict[str, Any] | str, str]:
    """Starts the processes of a contender and waits for them.

    Args:
        module: run by every process, with ``--contender JSON --found FILE`` before ``arguments``; rank 0 writes its
            figures to that file, as JSON.
        ranks: processes.
        contender: what ``--contender`` gets.
        arguments: further ones.
        limit: seconds after which the processes are killed.

    Returns:
        The figures, or why there are none; and all that the processes printed.
    """
    free()  # what this process holds of the first GPU
    with TemporaryDirectory() as folder:
        found, log = Path(folder, "found.json"), Path(folder, "log")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module,
            "--contender", json.dumps(contender), "--found", str(found), *arguments, *["--tiny"] * TOY,
        ]  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # ranks may wait for each other for ever
                process.wait()
        printed = log.read_text()
        if found.exists():
            return json.loads(found.read_text()), printed
    lines = printed.splitlines()
    reasons = [line for line in lines if "Error" in line] or [f"no result, and at last: {(lines or [''])[-1]}"]
    return reasons[0][:160], printed
