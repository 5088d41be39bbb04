"""No test can hang on a process that it started, and none leaves one behind."""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from tests.processes import limited, run

TESTS = Path(__file__).parents[1]
# Starts a child in a session of its own, as torchrun does, writes its id, and waits for ever.
HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_that_hangs_ends_with_its_children() -> None:
    with pytest.raises(AssertionError, match=r"ran for more than 1 seconds: \d+") as found:
        run([sys.executable, "-c", HANGING], limit=1)
    assert gone(int(str(found.value).split()[-1]))


def test_output_and_exit_status_come_back() -> None:
    result = run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")


def test_workers_that_hang_end() -> None:
    resource_tracker.ensure_running()  # it serves later tests too
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))

    def wait() -> None:
        with limited(1):
            worker.start()
            worker.join()

    with pytest.raises(AssertionError, match="worker processes took more than 1 seconds"):
        wait()
    assert worker.pid is not None and gone(worker.pid)


def gone(process: int) -> bool:
    """Returns whether a process ends within five seconds; a zombie has ended."""
    for _ in range(50):
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_every_process_is_started_with_a_limit() -> None:
    starts = re.compile(r"subprocess\.(run|Popen|check_\w+|call)\(|os\.(system|fork)\(")
    unlimited = re.compile(r"\.Pool\(|num_workers\W{1,3} ?[1-9]|num_workers=workers")
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if path.name in ("processes.py", "gpu.py") or path == Path(__file__):  # the latter has limits of its own
            continue
        assert not starts.search(text), f"{path}: start processes with tests.processes.run"
        if unlimited.search(text):
            assert "limited()" in text, f"{path}: wait for worker processes within tests.processes.limited()"
