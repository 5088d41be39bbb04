"""Packing runs: the same bytes for any number of workers, after any kill, and from parts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest

import crosspack
from crosspack.cli.packjob import PART_FILE
from crosspack.cli.progress import Ticker
from crosspack.encoding.text import Encoded
from crosspack.packing.journal import journal
from crosspack.packing.run import Part, Run, Worker
from crosspack.packing.unit import Key, Rules, make_unit
from crosspack.reading.places import Piece
from packing_core.planning.plan import plan
from packing_core.planning.rule import RowRule
from packing_core.training.schedule import EncodedDocument
from tests import processes
from tests.cli.console import run
from tests.cli.kills import killed_at
from tests.cli.packs import arguments, documents, pack, result, rows_of
from tests.cli.packs import corpus as corpus
from tests.packing_core import naive

# With one worker and with two, which cost more; 200 and more in a long run.
KILLS = [int(os.environ.get("CROSSPACK_KILLS", n)) for n in (3, 1)]


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.parquet"])
def test_the_bytes_do_not_depend_on_the_number_of_workers_nor_on_the_parts(corpus, tmp_path, name):
    given = arguments(corpus, "--rows-per-file", 40, name=name)
    pack(*given, "--output", tmp_path / "one", "--workers", 1)
    alone = result(tmp_path / "one")
    assert len(alone) > 5 and json.loads(alone["manifest.json"])["documents"] == 600
    with processes.limited():
        pack(*given, "--output", tmp_path / "three", "--workers", 3)
    assert result(tmp_path / "three") == alone
    for part in (2, 3, 1):
        pack(*given, "--output", tmp_path / "parts", "--part", f"{part}/3", "--workers", 1)
    pack("--merge", "--output", tmp_path / "parts", "--workers", 1)
    merged = result(tmp_path / "parts")
    assert {**merged, "manifest.json": b""} == {**alone, "manifest.json": b""}
    manifests = [json.loads(files["manifest.json"]) | {"run": ""} for files in (merged, alone)]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("overflow", ["split", "overlap", "restart"])
def test_long_documents_are_cut_as_by_hand_and_every_token_is_trained_once(corpus, tmp_path, overflow):
    pack(*arguments(corpus), "--output", tmp_path / "whole", "--workers", 1)
    cut = {"overflow": overflow, "context": 0 if overflow == "split" else 5, "min_piece": 4}
    options = ["--overflow", overflow, "--min-piece", 4, *([] if overflow == "split" else ["--context", 5])]
    pack(*arguments(corpus), "--capacity", 16, *options, "--output", tmp_path / "cut", "--workers", 1)
    expected = []
    for document in documents(tmp_path / "whole"):
        expected += zip(*naive.pieces(document, 16, **cut), strict=True)
    made = []
    for row in crosspack.read(tmp_path / "cut"):
        ends = np.cumsum(row["seq_lengths"])[:-1]
        ids, labels = (np.split(np.asarray(row[name]), ends) for name in ("input_ids", "labels"))
        made += [(a.tolist(), b.tolist()) for a, b in zip(ids, labels, strict=True)]
    assert len(expected) > 600
    assert sorted(made) == sorted(expected)
    manifest = json.loads((tmp_path / "cut" / "manifest.json").read_text())
    assert {name: manifest[name] for name in cut} == cut
    said = pack(*arguments(corpus), "--overflow", "drop", "--context", 5, "--output", tmp_path / "x", code=2)
    assert (
        "--context 5 has no effect under --overflow drop: pass --overflow overlap or restart, or leave --context"
        in said
    )


def test_a_cap_on_documents_and_the_size_of_units_change_no_document(corpus, tmp_path):
    options = {"capped": ("--max-segments", 2), "small": (), "whole": ("--block-size", 1 << 24)}
    for name, more in options.items():
        pack(*arguments(corpus), *more, "--output", tmp_path / name, "--workers", 1)
    assert {len(row["seq_lengths"]) for row in crosspack.read(tmp_path / "capped")} <= {1, 2}
    assert documents(tmp_path / "capped") == documents(tmp_path / "small") == documents(tmp_path / "whole")
    small, whole = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("small", "whole"))
    assert abs(small["efficiency"] - whole["efficiency"]) < 0.01


class Data:
    """Stands in for Ray Data where Ray is not installed: the calls that the engine makes, in this process."""

    def __init__(self, items: list[dict[str, Any]] | None = None) -> None:
        self.items = items or []
        self.DataContext = SimpleNamespace(get_current=lambda: SimpleNamespace())
        self.ActorPoolStrategy = SimpleNamespace

    def from_items(self, items: list[dict[str, Any]], *, override_num_blocks: int) -> Data:
        assert override_num_blocks == len(items)
        return Data(items)

    def map_batches(self, kind: Any, *, fn_constructor_args: tuple[Any, ...], **options: Any) -> Data:
        assert options["batch_size"] == 1
        actor = kind(*fn_constructor_args)
        batches = [{name: [value] for name, value in item.items()} for item in reversed(self.items)]
        made = [batch for given in batches for batch in actor(given)]
        return Data([dict(zip(batch, row)) for batch in made for row in zip(*batch.values())])

    def iter_rows(self) -> Any:
        return iter(self.items)


def test_the_engine_for_ray_hands_jobs_on_and_takes_results_in_any_order(corpus, tmp_path, monkeypatch):
    if find_spec("ray") is None:
        ray = SimpleNamespace(init=lambda **options: None, cluster_resources=lambda: {"CPU": 2.0}, data=Data())
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    pack(*arguments(corpus, name="data.parquet"), "--output", tmp_path / "here", "--workers", 1)
    with processes.limited():
        pack(*arguments(corpus, name="data.parquet"), "--output", tmp_path / "there", "--engine", "ray")
    assert result(tmp_path / "there") == result(tmp_path / "here")


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_units_fill_rows_as_one_plan_of_all_documents_does(tmp_path, capacity):
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 30_000).astype(int).clip(2, capacity)
    whole = plan(lengths, capacity, seed=0).efficiency
    rules = Rules(RowRule(capacity), 0, 1 << 20, "uint16")
    (tmp_path / "units").mkdir()
    with journal(tmp_path / "journal", {}) as log:
        run = Run([], Worker(None, rules, "stop", "parquet", tmp_path / "units", tmp_path), log, part=Part())
        for number, part in enumerate(np.array_split(lengths, 30)):
            piece = Piece(number, iter(()), 0)
            run.note(make_unit(Key(0, number), piece, Lengths(part), rules, "stop", tmp_path / "units"))
        run.pack_leftovers(lambda key: tmp_path / "units")
    assert run.totals.tokens == lengths.sum()
    assert abs(run.totals.tokens / (run.totals.rows * capacity) - whole) < 0.001 and whole > 0.998


class Lengths:
    """Stands in for an encoder: gives documents of these lengths."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def encoded(self, records: Any, *_: Any) -> Any:
        for length in self.lengths:
            yield Encoded("", {}, EncodedDocument(np.zeros(length, np.int32), np.ones(length, np.bool_)), {})


def test_a_part_that_is_missing_or_of_other_options_is_named(corpus, tmp_path):
    out = tmp_path / "out"
    pack(*arguments(corpus), "--output", out, "--part", "1/2")
    assert "--merge: part 2/2 is not there or not complete" in pack("--merge", "--output", out, code=2)
    pack(*arguments(corpus, "--seed", 1), "--output", out, "--part", "2/2")
    assert "was made of other data or with other options" in pack("--merge", "--output", out, code=2)
    assert "pass K/N with K from 1 to N" in pack(*arguments(corpus), "--output", out, "--part", "3/2", code=2)
    assert "holds no part" in pack("--merge", "--output", tmp_path / "empty", code=2)
    pack(*arguments(corpus), "--output", tmp_path / "alone", "--part", "1/1")
    (path,) = (tmp_path / "alone").rglob(PART_FILE)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"run": content["run"] | {"format": "mds"}}))
    said = pack("--merge", "--output", tmp_path / "alone", code=2)
    assert "are for mds files, which are written no more" in said
    rules = {name: value for name, value in content["run"]["rules"].items() if name != "rows"} | {"capacity": 64}
    path.write_text(json.dumps(content | {"run": content["run"] | {"rules": rules}}))
    said = pack("--merge", "--output", tmp_path / "alone", code=2)
    assert "the parts are of another version of crosspack, whose settings have other names" in " ".join(said.split())


@pytest.mark.parametrize(("workers", "rounds"), [*enumerate(KILLS, 1)])
def test_a_run_that_is_killed_anywhere_and_started_again_gives_the_same_bytes(corpus, tmp_path, workers, rounds):
    """For random n, killed before the n-th thing that it does to a file of its output, again and again.

    With several workers, these are killed wherever they are just then.
    """
    block_size = 9000 if workers == 1 else 1500  # several units for each worker
    given = list(map(str, arguments(corpus, "--rows-per-file", 40, "--block-size", block_size)))
    pack(*given, "--output", tmp_path / "expected", "--workers", 1)
    expected = result(tmp_path / "expected")
    out = tmp_path / "out"
    given += ["--output", str(out), "--workers", str(workers)]
    rng = np.random.default_rng(int(os.environ.get("CROSSPACK_SEED", "0")))
    kills = runs = 0
    while kills < rounds or runs < min(rounds, 2):
        status = killed_at(int(rng.integers(1, 150)) if kills < rounds else 0, ["pack", *given], out)
        kills += status == -signal.SIGKILL
        complete = (out / "manifest.json").exists()
        if complete:  # nothing looks finished that is not
            assert {name: x for name, x in result(out).items() if not name.startswith(".crosspack")} == expected
        if status != -signal.SIGKILL:
            assert complete and status in (0, 2)  # 2: it was complete before, so the folder is not empty
            assert result(out) == expected
            shutil.rmtree(out)
            runs += 1


@pytest.mark.slow
def test_workers_end_with_their_parent(corpus, tmp_path):
    given = arguments(corpus, "--workers", 2, "--block-size", 300, "--output", tmp_path / "out")
    journal = tmp_path / "out/.crosspack-partial-run/journal"
    command = [sys.executable, "-m", "crosspack", "pack", *map(str, given)]
    assert processes.killed_when(command, lambda: journal.exists() and journal.read_bytes().count(b"\n") > 3)
    pack(*given)
    pack(*given[:-1], tmp_path / "expected")
    assert result(tmp_path / "out") == result(tmp_path / "expected")


def test_data_sets_are_mixed_by_weight_in_every_unit(corpus, tmp_path):
    paths = [tmp_path / f"{name}.jsonl" for name in ("a", "b")]
    for path, n in zip(paths, (900, 300), strict=True):
        path.write_text("".join(json.dumps({"text": f"fox {i % 9} dog", "from": path.stem}) + "\n" for i in range(n)))
    data = ("--data", f"{paths[0]}:3", "--data", f"{paths[1]}:1", "--tokenizer", corpus[1], "--keep", "from")
    more = ("--capacity", 64, "--block-size", 4000)
    assert "is not read" not in pack(*data, *more, "--output", tmp_path / "out", "--workers", 1)
    with processes.limited():
        pack(*data, *more, "--output", tmp_path / "two", "--workers", 2)
    assert result(tmp_path / "two") == result(tmp_path / "out")
    halves = ("--data", f"{paths[0]}:1", "--data", f"{paths[1]}:1", *data[4:])
    said = run("pack", *halves, "--output", tmp_path / "1")
    assert f"about 67% of {paths[0]} is not read" in " ".join(said.stderr.split()), said.stderr
    origins = [origin for row in rows_of(tmp_path / "out") for origin in row["from"]]
    assert len(origins) > 1100 and abs(origins.count("a") / len(origins) - 0.75) < 0.01
    first = [origin for row in rows_of(tmp_path / "out")[:8] for origin in row["from"]]
    assert abs(first.count("a") / len(first) - 0.75) < 0.2
    unweighted = pack("--data", f"{paths[0]}:3", "--data", paths[1], "--output", tmp_path / "no", code=2)
    assert "some have a weight and some have none" in unweighted


def test_a_result_behind_a_url_is_uploaded_with_its_manifest_last(corpus, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/in/data.jsonl", (corpus[0] / "data.jsonl").read_bytes())
    given = ("--tokenizer", corpus[1], "--capacity", 64)
    try:
        pack("--data", "memory://in/data.jsonl", *given, "--output", "memory://out")
        assert "is not empty" in pack("--data", "memory://in/data.jsonl", *given, "--output", "memory://out", code=2)
        pack("--data", "memory://in/data.jsonl", *given, "--output", "memory://out", "--overwrite")
        pack("--data", corpus[0] / "data.jsonl", *given, "--output", tmp_path / "here")
        assert memory.cat("/out/train-00000.parquet") == (tmp_path / "here/train-00000.parquet").read_bytes()
        there = json.loads(memory.cat("/out/manifest.json"))
        assert there["documents"] == 600
        memory.pipe("/victim", b"v")
        listing = json.loads(memory.cat("/out/crosspack-files.json"))
        listing["files"].append({"name": "../victim", "size": 1, "sha256": "0"})
        memory.pipe("/out/crosspack-files.json", json.dumps(listing).encode())
        refused = pack("--data", "memory://in/data.jsonl", *given, "--output", "memory://out", "--overwrite", code=2)
        assert "is not a list that crosspack wrote" in refused and memory.cat("/victim") == b"v"
    finally:
        memory.store.clear()


def test_progress_is_logged_with_rates_and_the_time_left_until_the_files_are_written(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Ticker, "due", lambda ticker: True)
    pack(*arguments(corpus, "--rows-per-file", 40), "--output", tmp_path / "out", "--log", tmp_path / "log")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    line = lines[-1]
    files = len(list((tmp_path / "out").glob("train-*")))
    assert [line["documents"] for line in lines[-files - 1 :]] == [600] * (files + 1)
    assert {"documents_per_second", "megabytes_per_second", "tokens_per_second", "efficiency", "seconds_left"} < {*line}
