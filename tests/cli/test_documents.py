"""Documents that several processes tokenise: the same ones, in the same order, as one process reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crosspack.cli import documents
from crosspack.cli.documents import documents_together
from crosspack.cli.options import EncodedRecords, check_data
from crosspack.encoding.text import Policy
from crosspack.packing.workers import Processes
from packing_core.errors import PackingError
from packing_core.planning.rule import RowRule
from tests.cli.console import done

COUNT = 400


@pytest.fixture
def counts(monkeypatch) -> list[int]:
    """Counts the processes that are started each time; pieces are small."""
    found: list[int] = []

    class Counted(Processes):
        def __init__(self, work: Any, count: int) -> None:
            found.append(count)
            super().__init__(work, count)

    monkeypatch.setattr("crosspack.cli.packjob.Processes", Counted)
    monkeypatch.setattr(documents, "unit_size", lambda *_: 1 << 11)
    return found


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """Two files of texts and answers, with a record that is none, one without a key, and one that trains nothing."""
    rows: list[Any] = [{"prompt": f"fox {n}", "completion": "dog " * (n % 9), "rank": -n} for n in range(COUNT)]
    rows[70] = {"prompt": "no answer", "completion": 7, "rank": 0}
    rows[80].pop("rank")
    rows[90] = {"text": "x", "rank": 3}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"jugs {n}", "rank": n}) + "\n" for n in range(200)))
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


@pytest.mark.parametrize("shares", [(), ("", ""), (":0.5", ":0.5")], ids=["file", "files", "mixed"])
def test_documents_do_not_depend_on_the_number_of_processes(model, files, counts, shares):
    data = [name + share for name, share in zip(files, shares or ("",), strict=False)]

    def read(workers: int | None) -> tuple[Any, ...]:
        records = check_data(data, None, more=("rank",))
        source = EncodedRecords.of(records, str(model.parent), Policy("completion", eos=False))
        skipped: list[str] = []
        rule, limit = RowRule(64, order="sorted", keys="rank"), len(list(records.items())) if workers is None else None
        given = documents_together(source, rule, limit=limit, skipped=skipped, workers=workers)
        found = [(d.ids.tolist(), d.trained.tolist(), d.key) for d in given]
        return found, skipped, source.encoder.left_out

    one = read(None)
    assert len(one[0]) > COUNT / 3 and one[2]
    assert {reason.split()[-1] for reason in one[1]} == {"messages", "text"}
    assert read(1) == one and counts == []
    assert read(2) == one and counts == [2]


def test_the_first_record_that_cannot_be_used_is_named(model, files, counts):
    for workers in (1, 2):
        source = EncodedRecords.of(check_data(files[:1], None), str(model.parent), Policy())
        with pytest.raises(PackingError, match=r"a\.jsonl:71: "):
            list(documents_together(source, RowRule(64), workers=workers))


def test_train_and_bench_tokenise_by_several_processes(model, files, counts):
    common = ("--data", files[1], "--model", model, "--capacity", 64, "--device", "cpu", "--json")
    for command in (("train", "--steps", 1, "--eval-data", files[1]), ("bench", "--seconds", 0)):
        counts.clear()
        done(*command, *common, "--workers", 2)
        assert counts == ([2, 2] if command[0] == "train" else [2])
    counts.clear()
    done("train", "--steps", 1, *common)  # little data
    assert counts == []
