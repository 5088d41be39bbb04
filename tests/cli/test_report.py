"""``crosspack report``: what packing saves, by its tables and pictures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.console import PNG, one_line, run, words


@pytest.fixture
def report(data, model):
    return ("report", "--data", data, "--tokenizer", model.parent, "--capacity", 64)


def test_report_says_what_packing_saves(report, tmp_path):
    picture = tmp_path / "deep" / "report.png"
    result = run(*report, "--output", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(PNG)
    lines = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    padded = float(re.search(r"([\d.]+)%", lines["batches of 16, random"]).group(1))
    packed = float(re.search(r"([\d.]+)%", lines["rows of 64, packed"]).group(1))
    assert packed < 10 < 30 < padded
    computed = json.loads(run(*report, "--json").stdout)["computed_tokens"]
    assert f"{computed['batches of 16, random']:,}" in lines["batches of 16, random"]


def test_report_says_the_longest_row_of_a_model(report, model):
    alone = run("report", "--model", model, "--gpu", 2, "--json")
    assert alone.exit_code == 0, alone.output
    found = json.loads(alone.stdout)
    none, *_, offload = rows = list(found["longest_rows"].values())
    assert 1_000 < none < offload and rows == sorted(rows) and found["gpu_gib"] == 2
    adapted = json.loads(run("report", "--model", model, "--gpu", 2, "--adapters", 4, "--json").stdout)
    assert adapted["longest_rows"]["none"] != none  # such a small model has few weights, and adapters keep something
    both = json.loads(run(*report, "--model", model, "--gpu", "h100", "--json").stdout)
    assert both["documents"] and both["gpu_gib"] == 80 and both["time"]["gpu"] == "h100"
    assert f"{none:,}" in run("report", "--model", model, "--gpu", 2).output


def test_report_refuses_adapters_of_no_model_and_says_what_is_wrong_in_a_config(tmp_path):
    result = run("report", "--adapters", 4)
    assert result.exit_code == 2 and "--adapters 4 has an effect with --model alone" in words(result)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "4096"}))
    assert "field 'hidden_size': TypeError" in words(run("report", "--model", tmp_path, "--gpu", 80))


def test_report_refuses_a_gpu_that_is_neither_a_name_nor_a_size():
    for gpu in ("h900", 0, -1, "inf", "nan"):
        result = run("report", f"--gpu={gpu}")
        assert result.exit_code == 2
        assert "name one of a100, h100, h200, b200, l4, rtx4090, or its memory in GiB" in words(result)


def test_report_says_what_rows_are_made_of(report):
    by_length, mixed = (json.loads(run(*report, "--packing", s, "--json").stdout) for s in ("best_fit", "mixed"))
    assert mixed["packing"] == "mixed" and by_length["packing"] == "best_fit"
    assert json.loads(run(*report, "--json").stdout) == mixed, "the default"
    assert mixed["composition"]["row_distance"] < by_length["composition"]["row_distance"]
    lines = {line.split("│")[1].strip(): line for line in run(*report).output.splitlines() if line.startswith("│")}
    assert f"{mixed['composition']['documents_per_row']:,.1f}" in lines["documents per row, mean"]
    assert "documents per step of 8 rows, deviation" in lines


def test_report_needs_no_library_of_pictures_for_its_tables(report, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    result = run(*report)
    assert result.exit_code == 0 and "packed" in result.output
    assert not list(tmp_path.rglob("*.png"))  # none is drawn unasked
    assert "pip install 'crosspack[plot]'" in one_line(run(*report, "--output", "report.png"))


def test_report_replaces_no_picture_unasked(report, tmp_path):
    picture = tmp_path / "report.png"
    picture.write_text("mine")
    assert "report.png exists: pass --overwrite or another name" in one_line(run(*report, "--output", picture))
    assert picture.read_text() == "mine"
    assert run(*report, "--output", picture, "--overwrite").exit_code == 0
    assert picture.read_bytes().startswith(PNG)
    assert "name a page that ends in .html or a picture in .png, .pdf, .svg" in one_line(
        run(*report, "--output", tmp_path / "r.xyz")
    )
    assert "is a folder: name a file inside it" in one_line(run(*report, "--output", _folder(tmp_path / "r.png")))


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
def test_report_says_what_overflow_leaves_out(report, overflow):
    figures = json.loads(run(*report, "--capacity", 12, "--overflow", overflow, "--json").stdout)
    text = words(run(*report, "--capacity", 12, "--overflow", overflow))
    long, lost = figures["longer_than_capacity"], figures["tokens_left_out"]
    assert long > 1 and (lost == 0) == (overflow == "split")
    assert f"{long:,} documents longer than 12 tokens, under --overflow {overflow}: {lost:,} tokens" in text


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "quick", "input": "", "output": "zebras jump"},
        {"conversations": [{"from": "human", "value": "quick"}, {"from": "gpt", "value": "zebras"}]},
    ],
    ids=["Alpaca", "ShareGPT"],
)
def test_a_report_without_a_tokenizer_reads_every_layout(write, record):
    result = run("report", "--data", write("data.jsonl", [record] * 8), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["documents"] == 8


def test_a_report_of_token_ids_names_the_first_record_without_them(write):
    path = write("data.jsonl", [{"input_ids": [1, 2, 3]}, {"text": "fox"}])
    assert f"{path}:2 holds no token ids, as the records before it do" in one_line(run("report", "--data", path))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
