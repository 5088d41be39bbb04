"""Starts a script on several ranks of one machine, and ends all of them after 90 seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 90


def torchrun(script: str, *arguments: str, ranks: int = 2) -> None:
    """Run ``script`` of this folder with ``torchrun``; one thread for each rank.

    Raises:
        AssertionError: it failed, with the end of what it wrote, or ran for more than 90 seconds.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(
        [*launch, str(Path(__file__).with_name(script)), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too, which outlive torchrun
        output, _ = process.communicate()
        raise AssertionError(f"{script} ran for more than {LIMIT} seconds: {output[-3000:]}") from None
    assert process.returncode == 0, output[-3000:]
