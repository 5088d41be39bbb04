"""Commands that are killed before a file operation, and started again, leave what they leave undisturbed.

A sample of the operations: ``python -m tests.cli.kills`` has them all.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import crosspack
from crosspack.reading.folders import LISTING
from tests.cli import kills

STRIDE = int(os.environ.get("CROSSPACK_KILLS_STRIDE", "29"))
COMMANDS = [f"pack:{form}" for form in kills.FORMATS]
COMMANDS += ["pack:overwrite", "part", "merge", "train", "train:checkpoints"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, tuple[list[list[object]], Path]]:
    return kills.prepared(tmp_path_factory.mktemp("kills"))


def test_every_command_is_here(prepared):
    assert sorted(prepared) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_that_is_run_again_leaves_the_same_bytes(prepared, name):
    commands, out = prepared[name]
    found = kills.kill_everywhere(commands, out, stride=STRIDE, ignored=kills.differs_in_every_run, again=kills.resumed)
    assert found.wrong == [] and found.kills >= 2 and found.bytes


def test_a_pack_that_is_killed_leaves_no_list_of_files_before_there_are_any(prepared):
    ((command,), out) = prepared["pack:parquet"]
    for operation in (2, 9, 23):
        shutil.rmtree(out, ignore_errors=True)
        assert kills.killed_at(operation, command, out) == -signal.SIGKILL
        assert not (out / LISTING).exists() and not list(out.glob("train*"))
        (out / "mine.jsonl").write_text('{"text": "a"}\n')
        assert [row["text"] for row in crosspack.read(out)] == ["a"]
        assert kills.killed_at(0, [*command, "--overwrite"], out) == 2, "the folder holds a file of the user's"
        (out / "mine.jsonl").unlink()
        assert kills.killed_at(0, command, out) == 0 and (out / LISTING).stat().st_size
