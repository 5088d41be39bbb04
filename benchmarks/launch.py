"""Runs contenders of a benchmark in processes of their own, which torchrun starts and a time limit ends.

add_options(options)                              # in main, of every process
if not trained(chosen, train):                    # trains in a process that was started
    return collected(compared(...), ...)          # starts them, one contender after the other
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.clock import TOY
from benchmarks.harness import Figures, free, measured
from benchmarks.report import Result
from benchmarks.workload import RATE

OF_THE_LAUNCHER = ("contender", "figures", "ranks", "match", "budget", "limit", "output")


def add_options(options: argparse.ArgumentParser, limit: float) -> None:
    """Add those of every benchmark over ranks, and those by which :func:`compared` starts its processes.

    Args:
        limit: seconds for a contender.
    """
    options.add_argument("--ranks", type=int, default=2, help="processes, each with a GPU")
    options.add_argument("--contender", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options.set_defaults(limit=limit)


def trained(chosen: argparse.Namespace, train: Callable[[dict[str, Any]], Figures]) -> bool:
    """Trains in a process that :func:`compared` started, and returns whether this is one.

    Args:
        chosen: the options, with those of :func:`add_options`.
        train: the fields of a contender -> its figures, of which rank 0 writes its own.
    """
    if chosen.contender is None:
        return False
    if not TOY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    figures = train(chosen.contender)
    if os.environ["RANK"] == "0":
        chosen.figures.write_text(json.dumps(dict(figures)))
    return True


def compared(
    module: str, section: str, case: str, contenders: Sequence[Any], chosen: argparse.Namespace
) -> Iterator[Result]:
    """The results of each contender, and its speed beside that of the first one, if it is of one rank and ran.

    Args:
        module: whose ``main`` every process runs, with the options that were chosen.
        contenders: dataclasses with a ``name`` and ``ranks``, whose figures have real tokens per second.
    """
    one = None
    for contender in contenders:
        for result in measured(section, case, contender.name, RATE, partial(_launch, module, contender, chosen)):
            yield result
            if result.unit == RATE and result.value:
                one = result.value if contender == contenders[0] and contender.ranks == 1 else one
                if one:
                    yield replace(result, value=result.value / one, unit="times one")


def _launch(module: str, contender: Any, chosen: argparse.Namespace) -> Figures:
    """Starts the processes of a contender and waits for its figures; raises the reason if there are none."""
    free()  # what this process holds of the first GPU
    options = {name.replace("_", "-"): x for name, x in vars(chosen).items() if name not in OF_THE_LAUNCHER}
    chosen_ones = {name: x for name, x in options.items() if x is not None and x is not False}  # 0 is a choice
    arguments = [f"--{name}" if x is True else f"--{name}={x}" for name, x in chosen_ones.items()]
    with TemporaryDirectory() as folder:
        figures, log = Path(folder, "figures.json"), Path(folder, "log")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(contender.ranks),
            "-m", module, "--contender", json.dumps(asdict(contender)), "--figures", str(figures), *arguments,
        ]  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait()
            finally:
                _end(process)
        if figures.exists():
            measured: Figures = json.loads(figures.read_text())
            return measured
        lines = log.read_text().splitlines() or [""]
    raise RuntimeError(next((line for line in lines if "Error" in line), f"no result, and at last: {lines[-1]}"))


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and, by it, its ranks: they are in sessions of their own and may wait for each other for ever."""
    if launcher.poll() is None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the time limit, which would interrupt again
        launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(40)  # it gives its ranks 30 seconds to end before it kills them
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
