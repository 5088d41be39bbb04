"""``crosspack report``: what packing saves, by its tables, and how its page is written."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from tests.cli.console import done, one_line, run, words


@pytest.fixture
def report(data, model):
    return ("report", "--data", data, "--tokenizer", model.parent, "--capacity", 64)


def test_report_says_what_packing_saves(report, tmp_path):
    page = tmp_path / "deep" / "report.html"
    result = done(*report, "--output", page)
    assert page.read_text().startswith("<!doctype html>")
    lines = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    padded = float(re.search(r"([\d.]+)%", lines["batches of 16, random"]).group(1))
    packed = float(re.search(r"([\d.]+)%", lines["rows of 64, packed"]).group(1))
    assert packed < 10 < 30 < padded
    computed = json.loads(run(*report, "--json").stdout)["computed_tokens"]
    assert f"{computed['batches of 16, random']:,}" in lines["batches of 16, random"]


def test_report_says_the_longest_row_of_a_model(report, model):
    alone = done("report", "--model", model, "--gpu", 2, "--json")
    found = json.loads(alone.stdout)
    none, *_, offload = rows = list(found["longest_rows"].values())
    assert 1_000 < none < offload and rows == sorted(rows) and found["gpu_gib"] == 2
    adapted = json.loads(run("report", "--model", model, "--gpu", 2, "--adapters", 4, "--json").stdout)
    assert adapted["longest_rows"]["none"] != none  # such a small model has few weights, and adapters keep something
    hybrid = model.with_name("hybrid.json")
    hybrid.write_text('{"model_type": "jamba"}')
    reported = run(*report, "--model", hybrid, "--json")
    said = json.loads(reported.stdout)
    assert said["documents"] and "warning" in reported.stderr
    assert said["model"] == str(hybrid) and "longest_rows" not in said
    refused = one_line(run("report", "--model", hybrid))
    assert "how much jamba keeps of a step is not known beforehand" in refused
    assert refused.endswith("try --gradient-checkpointing")
    both = json.loads(run(*report, "--model", model, "--gpu", "h100", "--json").stdout)
    assert both["documents"] and both["gpu_gib"] == 80 and both["time"]["gpu"] == "h100"
    assert f"{none:,}" in run("report", "--model", model, "--gpu", 2).output


def test_report_says_what_rows_are_made_of(report):
    by_length, mixed = (json.loads(run(*report, "--packing", s, "--json").stdout) for s in ("best_fit", "mixed"))
    assert mixed["packing"] == "mixed" and by_length["packing"] == "best_fit"
    assert json.loads(run(*report, "--json").stdout) == mixed, "the default"
    assert mixed["composition"]["row_distance"] < by_length["composition"]["row_distance"]
    lines = {
        line.split("│")[1].strip(): line
        for line in run(*report, "--composition").output.splitlines()
        if line.startswith("│")
    }
    assert "documents per row, mean" not in run(*report).output
    assert f"{mixed['composition']['documents_per_row']:,.1f}" in lines["documents per row, mean"]
    assert "documents per step of 8 rows, deviation" in lines


def test_report_replaces_no_page_unasked(report, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("mine")
    assert "report.html exists: pass --overwrite or another name" in one_line(run(*report, "--output", page))
    assert page.read_text() == "mine"
    done(*report, "--output", page, "--overwrite")
    assert page.read_text().startswith("<!doctype html>")
    assert "name a page that ends in .html" in one_line(run(*report, "--output", tmp_path / "r.png"))
    (tmp_path / "r.html").mkdir()
    assert "is a folder: name a file inside it" in one_line(run(*report, "--output", tmp_path / "r.html"))


def test_a_report_that_cannot_be_written_leaves_the_old_page(report, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full(path: Path, *args: object, **options: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    said = run(*report, "--output", page, "--overwrite")
    assert said.exit_code == 2 and "No space left on device" in said.stderr.splitlines()[-1]
    monkeypatch.undo()
    assert page.read_text() == "old" and list(tmp_path.glob(".*.html")) == []


def test_what_a_report_cannot_follow_is_refused_by_name(write, tmp_path):
    result = run("report", "--adapters", 4)
    assert result.exit_code == 2 and "--adapters 4 has an effect with --model alone" in words(result)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "4096"}))
    assert "field 'hidden_size': TypeError" in words(run("report", "--model", tmp_path, "--gpu", 80))
    for gpu in ("h900", 0, -1, "inf", "nan"):
        result = run("report", f"--gpu={gpu}")
        assert result.exit_code == 2
        assert "name one of a100, h100, h200, b200, l4, rtx4090, or its memory in GiB" in words(result)
    path = write("data.jsonl", [{"input_ids": [1, 2, 3]}, {"text": "fox"}])
    assert f"{path}:2 holds no token ids, as the records before it do" in one_line(run("report", "--data", path))


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
def test_report_says_what_overflow_leaves_out(report, overflow):
    figures = json.loads(run(*report, "--capacity", 12, "--overflow", overflow, "--json").stdout)
    text = words(run(*report, "--capacity", 12, "--overflow", overflow))
    long, lost = figures["longer_than_capacity"], figures["tokens_left_out"]
    assert long > 1 and (lost == 0) == (overflow == "split")
    assert f"{long:,} documents longer than 12 tokens, under --overflow {overflow}: {lost:,} tokens" in text


def pieces_of(monkeypatch, size):
    monkeypatch.setattr("crosspack.cli.documents.unit_size", lambda *arguments: size)


def test_a_report_read_in_pieces_or_by_processes_is_that_of_one_read(report, monkeypatch, tmp_path):
    done(*report, "--output", tmp_path / "whole.html", "--json")
    whole = json.loads(run(*report, "--json").stdout)
    pieces_of(monkeypatch, 500)
    assert json.loads(run(*report, "--output", tmp_path / "pieces.html", "--json").stdout) == whole
    pages = [re.sub(r"chart-\d+", "", (tmp_path / name).read_text()) for name in ("whole.html", "pieces.html")]
    assert pages[0] == pages[1]
    monkeypatch.setattr("crosspack.cli.documents.INLINE_BYTES", 0)
    monkeypatch.setattr("crosspack.cli.documents.cores", lambda: 2)
    assert json.loads(run(*report, "--json").stdout) == whole


def test_a_report_counts_what_it_leaves_out_and_names_the_first_bad_record_of_all_pieces(write, model, monkeypatch):
    records = [{"prompt": "fox", "completion": " dog" * (n % 9 != 0)} for n in range(40)]
    command = ("report", "--tokenizer", model.parent, "--no-eos", "--capacity", 64)
    pieces_of(monkeypatch, 300)
    result = run(*command, "--data", write("gaps.jsonl", records))
    assert result.exit_code == 0 and "left out, nothing to train on: 5 documents" in words(result)
    assert "5 documents without a trained token" in words(result)
    bad = write("bad.jsonl", [*records[:20], {"prompt": "fox"}, *records[20:30], {"prompt": "fox"}])
    assert "bad.jsonl:21" in words(run(*command, "--data", bad))
