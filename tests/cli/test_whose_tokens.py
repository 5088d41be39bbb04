"""One tokenizer counts in every command: the one named, or that of the model; packed rows belong to theirs."""

from __future__ import annotations

import json

import pytest

from crosspack.cli.options import EncodedRecords, check_data
from crosspack.encoding.text import Policy
from crosspack.encoding.tokenizer import load_tokenizer, train_tokenizer
from packing_core.errors import PackingError
from tests.cli.console import done, run, words


@pytest.fixture
def other(tmp_path) -> str:
    """A tokenizer with as many entries as that of the model, which mean something else."""
    train_tokenizer(["zebras vex a sphinx of black quartz"] * 9 + ["jugs"], 300).save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


def test_report_counts_by_the_tokenizer_of_the_model_as_train_does(data, model, tmp_path):
    common = ("--data", data, "--capacity", 64, "--json")
    trained = done(
        "train", *common[:-1], "--model", model, "--device", "cpu", "--steps", 1, "--output", tmp_path / "run"
    )
    for named in (("--model", model), ("--model", model.parent), ("--tokenizer", model.parent)):
        found = json.loads(run("report", *common, *named).stdout)
        assert found["tokenizer"] == model.parent.name
        assert f"{found['tokens']:,}" in trained.output and f"{found['trained_tokens']:,}" in trained.output
    timed = words(run("report", *common[:-1], "--tokenizer", model.parent, "--run", tmp_path / "run"))
    said = timed.index(f"(at the speed of {tmp_path / 'run'} on cpu, ")
    assert said < timed.index("a row takes") < timed.index("warning:"), "before the warnings, beside the epoch"
    alone = run("report", *common[:-1])
    assert "pass the --model or --tokenizer to be trained" in words(alone)
    assert "pass the --model" not in words(run("report", *common[:-1], "--model", model))


def test_report_estimates_the_time_of_the_model_that_is_named(data, model):
    report = ("report", "--data", data, "--capacity", 64)
    assert f"estimated for {model} on one h100" in words(run(*report, "--model", model))
    assert "estimated for llama-1b on one h100" in words(run(*report, "--model", model, "--shape", "llama-1b"))
    assert "estimated for llama-8b at the speed of one h100, as 24 GiB name no card" in words(run(*report, "--gpu", 24))
    small, large = (json.loads(run(*report, *more, "--json").stdout) for more in (("--model", model), ()))
    assert small["time"]["hours"][-1]["hours"] < large["time"]["hours"][-1]["hours"] / 1000


@pytest.mark.parametrize("named", ["folder", "file"])
def test_rows_packed_with_another_tokenizer_are_refused_by_every_command(data, model, other, tmp_path, named):
    packed = tmp_path / "packed"
    done("pack", "--data", data, "--tokenizer", other, "--capacity", 64, "--output", packed)
    rows = packed if named == "folder" else next(packed.glob("*.parquet"))
    says = (
        f"{packed} was packed with another tokenizer than {model.parent}, so its token ids mean other texts: pack the"
    )
    for command in ("train", "report"):
        result = run(command, "--data", rows, "--model", model, "--capacity", 64)
        assert result.exit_code == 2 and says in words(result)
    held_out = run("train", "--data", data, "--eval-data", packed, "--eval-split", "train", "--model", model)
    assert held_out.exit_code == 2 and says in words(held_out)
    again = run("pack", "--data", rows, "--tokenizer", model.parent, "--output", tmp_path / "again")
    assert again.exit_code == 2 and says in words(again)
    done("report", "--data", rows, "--tokenizer", other, "--capacity", 64)
    assert run("report", "--data", rows, "--capacity", 64).exit_code == 0  # which needs no tokenizer


def test_rows_of_the_same_vocabulary_are_read_whatever_else_the_tokenizer_says(data, model, tmp_path):
    packed = tmp_path / "packed"
    done("pack", "--data", data, "--tokenizer", model.parent, "--capacity", 64, "--output", packed)
    copy = load_tokenizer(str(model.parent))
    copy.chat_template, copy.padding_side = "{{ messages }}", "left"
    copy.save_pretrained(tmp_path / "copy")
    for folder in (model.parent, packed / "tokenizer", tmp_path / "copy"):
        assert EncodedRecords.of(check_data([str(packed)], "train"), str(folder), Policy())


def test_parts_that_are_merged_name_their_tokenizer_too(data, model, other, tmp_path):
    packed = tmp_path / "packed"
    for part in ("1/2", "2/2"):
        done("pack", "--data", data, "--tokenizer", other, "--capacity", 64, "--output", packed, "--part", part)
    done("pack", "--merge", "--output", packed)
    with pytest.raises(PackingError, match="was packed with another tokenizer"):
        EncodedRecords.of(check_data([str(packed)], "train"), str(model.parent), Policy())


@pytest.mark.parametrize("manifest", ["[]", "not JSON", "{}", '{"tokenizer_digest": null}'])
def test_a_manifest_of_somebody_else_says_nothing_of_a_tokenizer(write, model, manifest):
    rows = write("rows/train.jsonl", [{"input_ids": [1, 2, 3]}])
    (rows.parent / "manifest.json").write_text(manifest)
    records = check_data([str(rows.parent)], "train")
    assert EncodedRecords.of(records, str(model.parent), Policy())
