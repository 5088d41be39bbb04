"""Locks of output folders: one process writes at a time, and a lock whose process is gone holds nobody up."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest

from crosspack.cli import lock
from crosspack.cli.listing import LOCK
from crosspack.cli.outputs import writing
from packing_core.errors import PackingError
from tests.cli.test_outputs import held, run


def test_a_second_writer_is_refused_and_says_who_the_first_is(tmp_path):
    out = tmp_path / "out"
    with writing(out, "manifest.json") as output:
        with pytest.raises(PackingError, match=rf"process {os.getpid()} on {socket.gethostname()} has been writing"):
            run(out, {})
        (output.partial / "train-0").write_text("a")
        output.publish()
    assert held(out) == {"train-0": "a"}


OTHERS = {"token": "t", "pid": 1, "host": "elsewhere", "processes": "", "since": "then"}
CONTAINER = {**OTHERS, "host": socket.gethostname(), "pid": 2**22 + 1}  # its id runs nowhere here, and it lives


@pytest.mark.parametrize("holder", ["{}", '{"pid": 1, "host": "elsewhere", "since": "then"}', json.dumps(CONTAINER)])
def test_a_lock_of_somebody_unknown_is_left_and_the_way_out_named(tmp_path, holder):
    (tmp_path / LOCK).write_text(holder)
    with pytest.raises(PackingError, match=rf"if it no longer runs, remove .*{LOCK}"):
        run(tmp_path, {})
    assert (tmp_path / LOCK).read_text() == holder


def test_an_empty_lock_is_nobodys_once_it_stays_empty(tmp_path, monkeypatch):
    """A process that makes a lock writes into it at once: an empty one is of a process that was killed in between."""
    monkeypatch.setattr(lock, "EMPTY", 0.1)
    (tmp_path / LOCK).touch()
    run(tmp_path, {"train-0": "a"})
    assert "train-0" in held(tmp_path)
    (tmp_path / LOCK).touch()
    written = threading.Timer(0.05, (tmp_path / LOCK).write_text, [json.dumps(OTHERS)])
    written.start()
    with pytest.raises(PackingError, match="process 1 on elsewhere has been writing"):
        run(tmp_path, {})
    written.join()


def silent(path, seconds: float) -> None:
    """As if a lock had shown no sign of life for so long."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("holder", [json.dumps(OTHERS), json.dumps({**OTHERS, "host": socket.gethostname()})])
@pytest.mark.parametrize("seconds", [61, -3600], ids=["silent", "clock set back"])
def test_a_lock_without_a_sign_of_life_is_taken_over(tmp_path, holder, seconds, monkeypatch):
    """Covers a full disk, another machine, and another container of this host name, whose process 1 is not ours."""
    (tmp_path / LOCK).write_text(holder)
    with pytest.raises(PackingError, match="if it no longer runs"):
        run(tmp_path, {})
    silent(tmp_path / LOCK, seconds)
    monkeypatch.setattr(lock, "BEAT", 0.02)
    run(tmp_path, {"train-0": "a"})
    assert held(tmp_path) == {"manifest.json": "{}", "train-0": "a"}


def test_a_writer_shows_signs_of_life_and_notices_that_it_was_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with writing(tmp_path, "manifest.json") as output:
        silent(tmp_path / LOCK, 61)
        while time.time() - (tmp_path / LOCK).stat().st_mtime > 30:
            time.sleep(0.01)
        (tmp_path / LOCK).write_text("another's")
        with pytest.raises(PackingError, match="another process took the folder over"):
            output.publish()
    assert (tmp_path / LOCK).read_text() == "another's"


@pytest.mark.parametrize("seconds", [61, -3600], ids=["set ahead", "set back"])
def test_a_clock_that_is_set_takes_no_lock_from_a_process_that_lives(tmp_path, monkeypatch, seconds):
    (tmp_path / LOCK).write_text(json.dumps(OTHERS))
    silent(tmp_path / LOCK, seconds)
    monkeypatch.setattr(lock, "BEAT", 0.2)
    beat = threading.Timer(0.1, os.utime, [tmp_path / LOCK])
    beat.start()
    with pytest.raises(PackingError, match="has been writing there"):
        run(tmp_path, {})
    beat.join()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").write_text("v")
    (tmp_path / "out" / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(PackingError, match="is a link or no file"):
        run(tmp_path / "out", {})
    assert (tmp_path / "victim").read_text() == "v" and (tmp_path / "out" / LOCK).is_symlink()
