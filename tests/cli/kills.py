"""Kills ``crosspack`` before every file operation of a command, and compares what the next run leaves.

    python -m tests.cli.kills                  # every command and format, every operation; minutes to an hour
    python -m tests.cli.kills --stride 7 pack:parquet merge

Each command is run in copies of this process. The first is killed with SIGKILL before its first operation on a file of
its output, the next before its second, and so on until one is not killed any more. After each kill the same command
runs again and must end with status 0 and the bytes of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import processes
from tests.cli.console import run

EVENTS = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink")
FORMATS = ("parquet", "arrow")


def killed_at(operation: int, arguments: Sequence[object], folder: Path) -> int:
    """Runs a command in a copy of this process, killed before its n-th operation on a file below ``folder``.

    Returns:
        The exit status, or minus the signal.
    """
    left = operation

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal left
        if event in EVENTS and str(folder) in _path(details):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    def work() -> int:
        sys.addaudithook(count)
        return run(*arguments).exit_code

    return processes.forked(work)


def _path(details: tuple[Any, ...]) -> str:
    """The path that an audit event names: relative ones are below the folder of a descriptor."""
    descriptor = next((x for x in details[1:] if isinstance(x, int) and x > 2), None)
    if os.path.isabs(str(details[0])) or descriptor is None:
        return str(details[0])
    with suppress(OSError):
        return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), str(details[0]))
    return str(details[0])


def content(folder: Path, ignored: Callable[[str], bool] = lambda name: False) -> dict[str, bytes]:
    """Every file below a folder by its name."""
    return {
        name: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not ignored(name := path.relative_to(folder).as_posix())
    }


@dataclass
class Killed:
    """Counts of a campaign."""

    kills: int = 0
    operations: int = 0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def kill_everywhere(
    commands: Sequence[Sequence[object]],
    out: Path,
    *,
    stride: int = 1,
    ignored: Callable[[str], bool] = lambda name: False,
    again: Callable[[Sequence[object], Path], Sequence[object]] = lambda command, out: command,
) -> Killed:
    """Kills the last of some commands at every ``stride``-th operation, and runs it again.

    Args:
        commands: run in turn; each writes to ``out``, which they begin without.
        out: is removed before each round.
        stride: 1 for every operation.
        ignored: names of files that may differ.
        again: the command that is run after a kill; by default the same.
    """
    *before, last = commands
    found = Killed()

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        for command in before:
            assert killed_at(0, command, out) == 0, command

    shutil.rmtree(out, ignore_errors=True)
    for command in commands:  # in this process, so that its copies find every module imported
        assert run(*command).exit_code == 0, command
    expected = content(out, ignored)
    operation = 1
    while True:
        prepare()
        status = killed_at(operation, last, out)
        if status != -signal.SIGKILL:
            found.operations = operation - stride
            assert status == 0, status
            return found
        found.kills += 1
        ended = killed_at(0, again(last, out), out)
        left = content(out, ignored)
        found.bytes += sum(map(len, left.values()))
        if ended or left != expected:
            names = sorted(set(left) ^ set(expected)) or [name for name in left if left[name] != expected[name]]
            found.wrong.append(f"operation {operation}: status {ended}, differs in {names[:5]}")
        operation += stride


def prepared(folder: Path) -> dict[str, tuple[list[list[object]], Path]]:
    """Makes data and a model in a folder; returns what can be killed: commands by name, and the output of each."""
    from crosspack.encoding.tokenizer import train_tokenizer
    from tests.cli.conftest import LLAMA, SENTENCES

    texts = [" ".join(SENTENCES[(3 * n + k) % 4] for k in range(1 + n % 3)) for n in range(90)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(SENTENCES * 4, 320).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    data = ["--data", folder / "data.jsonl", "--capacity", 64]
    pack = ["pack", *data, "--tokenizer", folder / "model", "--block-size", 3000, "--workers", 1, "--rows-per-file", 20]

    def to(name: str, command: list[object], *others: list[object]) -> tuple[list[list[object]], Path]:
        out = folder / name
        return [[*each, "--output", out] for each in (*others, command)], out

    halves = [[*pack, "--part", f"{part}/2"] for part in (1, 2)]
    made = {f"pack:{form}": to(f"pack-{form}", [*pack, "--format", form]) for form in FORMATS}
    made["pack:overwrite"] = to("pack-overwrite", [*pack, "--seed", 1, "--overwrite"], pack)
    made["part"] = to("part", halves[0])
    made["merge"] = to("merge", ["pack", "--merge"], *halves)
    train: list[object] = ["train", "--model", folder / "model" / "config.json", *data, "--device", "cpu", "--steps", 4]
    made["train"] = to("train", train)
    made["train:checkpoints"] = to("train-checkpoints", [*train, "--save-every", 1])
    return made


def resumed(command: Sequence[object], out: Path) -> Sequence[object]:
    """The command that goes on after a kill: the same, with ``--resume`` once there is a checkpoint."""
    return [*command, "--resume"] if list(out.glob("checkpoints/step-*/state.json")) else command


def differs_in_every_run(name: str) -> bool:
    """Returns whether a file holds times, which differ between runs: the summary of a training, a list of files."""
    return Path(name).name in ("crosspack.json", "crosspack-files.json", "state.json")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="COMMAND")
    options.add_argument("--stride", type=int, default=1)
    given = options.parse_args()
    wrong = 0
    with TemporaryDirectory() as folder:
        for name, (commands, out) in prepared(Path(folder)).items():
            if given.names and name not in given.names:
                continue
            began = time.monotonic()
            found = kill_everywhere(commands, out, stride=given.stride, ignored=differs_in_every_run, again=resumed)
            print(
                f"{name}: {found.kills} kills in {found.operations} operations, {found.bytes:,} bytes compared, "
                f"{len(found.wrong)} wrong, {time.monotonic() - began:.0f} s",
                *found.wrong,
                sep="\n  ",
                flush=True,
            )
            wrong += len(found.wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
