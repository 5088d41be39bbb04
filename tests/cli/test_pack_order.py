"""``crosspack pack --order`` and ``--equal-cost``: rows of one plan, the same bytes from parts and after a kill."""

from __future__ import annotations

import json
import signal
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import crosspack
from packing_core.planning.cost import Cost
from packing_core.planning.epochs import plan_steps
from packing_core.planning.order import octaves
from packing_core.planning.plan import plan
from tests.cli.kills import killed_at
from tests.cli.packs import pack, result

CAPACITY = 64
ORDERS = [("curriculum", None), ("sorted", "day"), ("grouped", "topic")]


@pytest.fixture(scope="module")
def data(tokenizer, tmp_path_factory) -> Path:
    """Document d is the token d // 4 + 10, 2 to 60 times, of a day and a topic."""
    folder = tmp_path_factory.mktemp("ordered")
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    records = [
        {"input_ids": [d // 4 + 10] * int(n), "id": d, "day": int(rng.integers(30)), "topic": "abc"[rng.integers(3)]}
        for d, n in enumerate(rng.integers(2, 60, 600))
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def given(data: Path, order: str, column: str | None, *more: object, name: str = "data.jsonl") -> list[str]:
    by = [] if column is None else ["--order-by", column]
    options = ["--data", data / name, "--tokenizer", data / "tokenizer", "--capacity", CAPACITY, "--workers", 1]
    return [*map(str, [*options, "--block-size", 4000, "--rows-per-file", 100, "--order", order, *by, *more])]


def planned(data: Path, order: str, column: str | None) -> list[list[int]]:
    records = [json.loads(line) for line in (data / "data.jsonl").read_text().splitlines()]
    keys = None if column is None else [record[column] for record in records]
    lengths = [len(record["input_ids"]) for record in records]
    return plan(lengths, CAPACITY, order=order, keys=keys).to_lists()  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(("order", "column"), ORDERS)
def test_rows_are_those_of_one_plan_in_that_order_whatever_the_units_and_blocks(
    data, tmp_path, order, column, monkeypatch
):
    monkeypatch.setattr("crosspack.packing.run.TOGETHER", 20 * CAPACITY)
    pack(*given(data, order, column, "--keep", "id", "--keep", "topic"), "--output", tmp_path / "out")
    rows = list(crosspack.read(tmp_path / "out"))
    assert [list(row["id"]) for row in rows] == planned(data, order, column)
    for row in rows:
        ends = np.cumsum(row["seq_lengths"])[:-1]
        documents = np.split(np.asarray(row["input_ids"]), ends)
        assert [set(tokens.tolist()) for tokens in documents] == [{d // 4 + 10} for d in row["id"]]
        assert "order key" not in row
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["order"], manifest["order_by"], manifest["documents"]) == (order, column, 600)
    if order == "curriculum":
        longest = octaves(np.array([max(row["seq_lengths"]) for row in rows]))
        assert np.count_nonzero(np.diff(longest) < 0) < 6, "stages of rising length, but for rows that moved on"


def test_parts_and_several_workers_give_the_same_bytes(data, tmp_path):
    one = given(data, "grouped", "topic")
    pack(*one, "--output", tmp_path / "one")
    pack(*one, "--workers", 2, "--output", tmp_path / "two")
    for part in ("2/2", "1/2"):
        pack(*one, "--part", part, "--output", tmp_path / "parts")
    pack("--merge", "--output", tmp_path / "parts")
    expected = result(tmp_path / "one")
    assert result(tmp_path / "two") == expected
    merged = result(tmp_path / "parts")
    assert {name: merged[name] for name in merged if name != "manifest.json"} == {
        name: expected[name] for name in expected if name != "manifest.json"
    }


def test_rows_of_a_step_cost_the_same_from_parts_and_after_a_kill(data, tmp_path):
    lengths = np.random.default_rng(0).lognormal(np.log(512) - 1, 1.4, 120).clip(2, 8192).astype(int).tolist()
    records = [{"input_ids": [10] * n, "id": d} for d, n in enumerate(lengths)]
    (tmp_path / "tail.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    known = ["--data", tmp_path / "tail.jsonl", "--tokenizer", data / "tokenizer", "--capacity", 8192, "--workers", 1]
    mixed = [*map(str, [*known, "--block-size", 40_000, "--keep", "id"])]
    even = [*mixed, "--equal-cost", "--rows-per-step", "4"]

    def slowest_over_mean(folder: Path) -> float:
        costs = [Cost().of_segments(row["seq_lengths"]).sum() for row in crosspack.read(folder)]
        steps = np.array(costs[: len(costs) // 4 * 4]).reshape(-1, 4)
        return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())

    pack(*mixed, "--output", tmp_path / "mixed")
    pack(*even, "--output", tmp_path / "even")
    expected = plan_steps(lengths, 8192, 4, seed=0).to_lists()
    assert [list(row["id"]) for row in crosspack.read(tmp_path / "even")] == expected
    assert slowest_over_mean(tmp_path / "even") < 1.01 < slowest_over_mean(tmp_path / "mixed")
    manifest = json.loads((tmp_path / "even" / "manifest.json").read_text())
    assert (manifest["equal_cost"], manifest["rows_per_step"]) == (True, 4)

    killed = [*even, "--output", str(tmp_path / "out")]
    assert killed_at(40, ["pack", *killed], tmp_path / "out") == -signal.SIGKILL
    pack(*killed)
    assert result(tmp_path / "out") == result(tmp_path / "even")
    for part in ("2/2", "1/2"):
        pack(*even, "--part", part, "--output", tmp_path / "parts")
    pack("--merge", "--output", tmp_path / "parts")
    for path in (tmp_path / "even").glob("train*"):
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()


def test_records_without_a_key_are_named_and_skipped_on_demand(data, tmp_path):
    lines = (data / "data.jsonl").read_text().splitlines()
    for number, bad in ((7, {"day": None}), (9, {"day": [3]}), (500, {"day": "monday"})):
        lines[number] = json.dumps(json.loads(lines[number]) | bad)
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    options = [*given(data, "sorted", "day"), "--output", str(tmp_path / "out")]
    options[1] = str(tmp_path / "bad.jsonl")
    refused = pack(*options, code=2)
    assert "bad.jsonl:8 has no day, by which --order-by orders: give every record a number or a text" in refused
    refused = pack(*options, "--on-error", "skip", code=2)
    assert "--order-by day is a number at " in refused and "bad.jsonl:501: give every record a number" in refused
    lines[500] = lines[501]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    pack(*options, "--on-error", "quarantine")
    bad = [json.loads(line) for line in (tmp_path / "out" / "bad_records.jsonl").read_text().splitlines()]
    assert [Path(found["where"]).name for found in bad] == ["bad.jsonl:8", "bad.jsonl:10"]
    assert "has [3] in day, by which --order-by orders" in bad[1]["error"]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["documents"] == 598


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--order", "sorted"], "--order sorted needs --order-by: pass one key per document"),
        (["--order-by", "day"], "--order-by has no effect under --order random"),
        (["--order", "curriculum", "--packing", "best_fit"], "in stages of its own: leave --packing best_fit"),
        (["--equal-cost"], "--equal-cost needs --rows-per-step, how many rows of the files are trained together"),
        (["--rows-per-step", 4], "--rows-per-step 4 has no effect without --equal-cost: pass both or neither"),
        (["--equal-cost", "--rows-per-step", 4, "--order", "curriculum"], "cost: leave it or --order curriculum out"),
        (["--equal-cost", "--rows-per-step", 4, "--packing", "best_fit"], "by cost: leave --packing best_fit out"),
        (["--equal-cost", "--rows-per-step", 1], "and --rows-per-step 1 gives it one: pass more"),
        (
            ["--equal-cost", "--rows-per-step", 999],
            "--equal-cost needs a document for each row of a step, and there are 600 documents and --rows-per-step 999:"
            " lower it, or leave --equal-cost out",
        ),
    ],
)
def test_contradictory_options_are_refused(data, tmp_path, options, said):
    known = ["--data", data / "data.jsonl", "--tokenizer", data / "tokenizer", "--output", tmp_path / "out"]
    assert said in pack(*known, *options, code=2)


def test_keys_of_a_csv_are_numbers_and_dates_of_parquet_are_sorted(tokenizer, tmp_path):
    days = [10, 9, 100]
    table = pa.table({"text": ["fox"] * 3, "day": [date(2024, 1, 1) + timedelta(day) for day in days], "id": days})
    pq.write_table(table, tmp_path / "data.parquet")
    rows = "".join(f"fox,{day},{day}\n" for day in days)
    (tmp_path / "data.csv").write_text(f"text,day,id\n{rows}")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for name in ("data.csv", "data.parquet"):
        out = tmp_path / f"out-{name}"
        options = ["--data", tmp_path / name, "--tokenizer", tmp_path / "tokenizer", "--capacity", 4, "--keep", "id"]
        pack(*options, "--max-segments", 1, "--order", "sorted", "--order-by", "day", "--output", out)
        table = pq.read_table(out / "train-00000.parquet")
        assert [int(ids[0]) for ids in table["id"].to_pylist()] == [9, 10, 100]
