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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_clock import TOY, Result, free, seconds_left, wanted


def launch(
    module: str, ranks: int, contender: Mapping[str, Any], arguments: Sequence[str], limit: float
) -> dict[str, Any] | str:
    """Starts the processes of a contender and waits for them.

    Args:
        module: run by every process, with ``--contender JSON --found FILE`` before ``arguments``; rank 0 writes its
            figures to that file, as JSON.
        ranks: processes.
        contender: what ``--contender`` gets.
        arguments: further ones.
        limit: seconds after which the processes are killed.

    Returns:
        The figures, or why there are none.
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
            figures: dict[str, Any] = json.loads(found.read_text())
            return figures
    lines = printed.splitlines()
    reasons = [line for line in lines if "Error" in line] or [f"no result, and at last: {(lines or [''])[-1]}"]
    return reasons[0][:160]


def add_options(options: argparse.ArgumentParser) -> None:
    """Add those of every benchmark over ranks, and those by which :func:`launch` starts its processes."""
    options.add_argument("--ranks", type=int, default=2, help="processes, each with a GPU")
    options.add_argument("--contender", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument("--found", type=Path, help=argparse.SUPPRESS)


def trained(chosen: argparse.Namespace, train: Callable[[Mapping[str, Any]], Any]) -> bool:
    """Trains in a process that :func:`launch` started, and returns whether this is one.

    Args:
        chosen: the options, with those of :func:`add_options`.
        train: what ``--contender`` got -> a dataclass of figures, which rank 0 writes.
    """
    if chosen.contender is None:
        return False
    if not TOY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    measured = train(chosen.contender)
    if os.environ["RANK"] == "0":
        chosen.found.write_text(json.dumps(asdict(measured)))
    return True


def compared(contenders: Sequence[Any], launched: Callable[[Any], list[Result]]) -> Iterator[Result]:
    """The results of each contender, and its speed beside that of the first one, if it is of one rank and ran.

    Args:
        contenders: each with a ``name`` and ``ranks``.
        launched: starts the processes of one; its first result is the speed.
    """
    one = None
    for contender in contenders:
        if wanted(contender.name) and seconds_left() > 0:
            found = launched(contender)
            if speed := found[0].value:
                one = speed if contender == contenders[0] and contender.ranks == 1 else one
                if one:
                    found.append(replace(found[0], value=speed / one, unit="times one"))
            yield from found
