"""``crosspack audit``: the verdict of every path, in the table, in the JSON and in the exit status."""

from __future__ import annotations

import io
import json

import pytest
import transformers
from rich.console import Console

from crosspack.cli.audit import _model_table
from packing_core.errors import PackingError
from tests.cli.console import run
from torch_backend.stacks.paths import PATHS, PathResult, config_of, survey


@pytest.mark.parametrize(
    ("family", "verdicts"),
    [
        # Dense models under TRL's keys are exact in stock transformers; the default cache is what makes them leak.
        ("llama", ["contaminated", "contaminated", "exact", "exact", "exact"]),
        # Never hands position_ids to its mask.
        ("gpt_oss", ["contaminated", "contaminated", "contaminated", "contaminated", "exact"]),
    ],
)
def test_every_path_has_a_verdict(family, verdicts) -> None:
    results = survey(config_of(family))
    assert [result.path for result in results] == list(PATHS)
    assert [result.verdict for result in results] == verdicts
    assert all(result.logits > 0.1 for result in results if result.verdict == "contaminated")
    assert all(result.gradients < 1e-5 for result in results if result.verdict == "exact")


def test_the_exit_status_and_the_json_tell_contamination(tmp_path) -> None:
    transformers.Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    result = run("audit", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert "contaminated" in result.stderr and "exact" in result.stderr
    rows = json.loads(result.stdout)["families"][str(tmp_path)]
    assert {row["path"]: row["verdict"] for row in rows}["patched"] == "exact"
    assert run("audit", str(tmp_path), "--path", "patched").exit_code == 0


@pytest.mark.parametrize(
    ("family", "verdicts"),
    [
        ("llama", ["exact", "exact"]),
        ("gpt_oss", ["contaminated", "exact"]),
        ("lfm2", ["refused", "exact"]),  # TRL raises without causal_conv1d
    ],
)
def test_trl_is_judged_as_people_build_it(family, verdicts) -> None:
    pytest.importorskip("trl", reason="it is what is audited")
    enabled = "SFTTrainer(packing=True), enable_packing"
    result = run("audit", family, "--trainer", "trl", "--json", "--path", enabled)
    assert result.exit_code == 0, result.output
    rows = {row["path"]: row for row in json.loads(result.stdout)["families"][family]}
    assert [rows[path]["verdict"] for path in ("SFTTrainer(packing=True)", enabled)] == verdicts
    assert rows[enabled]["logits"] is None and rows[enabled]["gradients"] < 1e-4
    assert "SFTTrainer(packing=True), enable_packing" in result.stderr
    alone = run("audit", family, "--trainer", "trl", "--path", "SFTTrainer(packing=True)")
    assert alone.exit_code == (rows["SFTTrainer(packing=True)"]["verdict"] == "contaminated")


def test_the_table_says_what_was_audited_and_what_its_numbers_mean(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("audit", "lfm2", "--trainer", "trl", "--path", "patched")
    text = " ".join(result.output.split())
    assert "Audited: a tiny random clone of lfm2 with every layer kind, on the CPU in float32" in text
    assert "contaminated above 1e-3, and refused if it raises an error" in text
    assert max(map(len, result.output.splitlines())) <= 80


def test_what_a_path_raised_is_shown_as_it_is() -> None:
    """Square brackets are rich's markup too."""
    row = PathResult("stock", raises="ImportError: pip install 'crosspack[hf]'")
    out = io.StringIO()
    Console(file=out, width=120).print(_model_table([row]))
    assert "pip install 'crosspack[hf]'" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "crosspack audit takes a model, or --all-families"),
        (("llama", "--path", "nowhere"), "--path nowhere: there is position_ids,"),
        (("llama", "--trainer", "nobody"), "--trainer nobody: there is trl"),
        (("llama", "--backend", "nothing"), "--backend nothing: the installed ones are"),
        (("t5",), "crosspack: t5 is no causal language model of transformers"),
        (("absent",), "give a folder that save_pretrained wrote, or a type such as llama"),
    ],
)
def test_bad_options_end_with_one_line(arguments, text) -> None:
    result = run("audit", *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


BROKEN = ["", "[]", "{}", '{"model_type": "absent"}', '{"model_type": "llama", "hidden_size": "x"}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_config_that_cannot_be_read_is_an_error_that_names_the_folder(content, tmp_path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PackingError, match="no config that transformers reads") as error:
        config_of(str(tmp_path))
    assert str(error.value).startswith(str(tmp_path)) and len(str(error.value)) < 400
