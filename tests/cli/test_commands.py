"""The console commands as a user runs them: what they print, what they write, and how they fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from crosspack.cli import COMMANDS, app

PNG = b"\x89PNG"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def run(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, [str(argument) for argument in arguments])


def words(result) -> str:
    return " ".join(result.output.split())


@pytest.fixture
def data(write) -> Path:
    rng = np.random.default_rng(7)
    vocabulary = ["fox", "dog", "box", "jugs", "quick", "lazy", "zebras", "jump"]
    records = [
        {"prompt": " ".join(rng.choice(vocabulary, rng.integers(1, 6))), "completion": " fox" * rng.integers(1, 12)}
        for _ in range(60)
    ]
    return write("data.jsonl", records)


@pytest.fixture
def model(tokenizer, tmp_path) -> Path:
    """A folder with a config.json and a tokenizer, and no weights."""
    folder = tmp_path / "start"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder / "config.json"


@pytest.fixture
def small(model, data) -> tuple[object, ...]:
    return ("train", "--model", model, "--data", data, "--capacity", 64, "--device", "cpu", "--lr", 0.01)


def losses(folder: Path, run: str = "packed") -> list[float]:
    return [record["loss"] for record in json.loads((folder / "crosspack.json").read_text())["runs"][run]]


def test_help_names_every_command_and_each_has_its_own():
    help = run("--help")
    assert help.exit_code == 0
    for command in COMMANDS:
        assert command in help.output
        own = run(command, "--help")
        assert own.exit_code == 0
        assert "--data" in own.output or "Usage" in own.output


def test_train_prints_the_plan_first_and_leaves_a_folder_to_go_on_with(small, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    result = run(*small, "--output", out, "--epochs", 2, "--rows-per-step", 2)
    assert result.exit_code == 0, result.output
    text = result.output
    assert "BOS none, EOS <|endoftext|> (trained)" in words(result)
    for line in ("optimizer steps per epoch", "documents per step", "trained tokens per step", "efficiency"):
        assert text.index(line) < text.index("audit: exact")
    assert losses(out)[-1] < losses(out)[0] - 0.5
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("lazy dog")["input_ids"]) == "lazy dog"
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 320
    again = run("train", "--model", out, *small[3:], "--steps", 1, "--output", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert losses(tmp_path / "again")[0] < losses(out)[0] - 0.5


def test_compare_shows_equal_losses_and_draws_the_picture(small, tmp_path):
    out = tmp_path / "out"
    result = run(*small, "--compare", "--output", out, "--padded-batch", 8)
    assert result.exit_code == 0, result.output
    for line in ("real tokens/s", "speed", "padding", "largest loss difference from packed", "audit: exact"):
        assert line in result.output
    for other in ("padded", "grouped"):
        np.testing.assert_allclose(losses(out, other), losses(out), rtol=1e-4)
    shares = [float(share) for share in re.findall(r"([\d.]+)%", result.output.split("│ padding")[1].splitlines()[0])]
    assert shares[0] > shares[1] > shares[2]
    assert (out / "compare.png").read_bytes().startswith(PNG)


def test_a_resumed_run_has_the_losses_of_a_whole_one(small, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("--rows-per-step", 2, "--save-every", 3)
    assert run(*small, *options, "--output", whole).exit_code == 0
    assert run(*small, *options, "--output", parts).exit_code == 0
    assert len(losses(parts)) % 3, "the last checkpoint must not be the end"
    (parts / "crosspack.json").unlink()
    resumed = run(*small, *options, "--output", parts, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert losses(parts) == losses(whole)
    changed = run(*small, *options, "--output", parts, "--resume", "--seed", 1)
    assert changed.exit_code == 2
    assert "was written with another seed, plan" in words(changed)


def test_the_built_in_default_trains(tmp_path):
    result = run("train", "--steps", 1, "--rows-per-step", 1, "--device", "cpu", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "a small Llama, random weights on docstrings of the Python standard library" in words(result)
    assert losses(tmp_path)[0] == pytest.approx(np.log(2048), rel=0.05)


def test_report_says_what_packing_saves(data, model, tmp_path):
    picture = tmp_path / "deep" / "report.png"
    result = run("report", "--data", data, "--tokenizer", model.parent, "--capacity", 64, "--output", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(PNG)
    lines = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    padded = float(re.search(r"([\d.]+)%", lines["batches of 16, random"]).group(1))
    packed = float(re.search(r"([\d.]+)%", lines["rows of 64, packed"]).group(1))
    assert packed < 10 < 30 < padded


def test_report_lists_what_overflow_does(data, model, tmp_path):
    options = ("report", "--data", data, "--tokenizer", model.parent, "--output", tmp_path / "r.png", "--capacity", 12)
    assert re.search(r"\d+ documents are longer than 12 tokens and truncated", words(run(*options)))
    assert re.search(r"\d+ documents are longer than 12 tokens and dropped", words(run(*options, "--overflow", "drop")))


def one_line(result) -> str:
    """The error, after checking that it is one line on standard error, exit status 2, without a traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("crosspack: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "absent.jsonl"], "--data absent.jsonl: no such file or folder"),
        (["--model", "./absent"], "tokenizer ./absent: no such folder, and not a hub name"),
        (["--backend", "abacus"], "--backend abacus: the installed ones are "),
        (["--resume"], "--resume and --save-every need --output"),
        (["--compare", "--save-every", "2"], "--compare measures whole runs"),
        (["--capacity", "8"], "data.jsonl:1: a document has 32 tokens and capacity is 8: pass --overflow split"),
        (["--device", "abacus"], "--device abacus: "),
        (["--bos"], "--bos was given and the tokenizer has no BOS token"),
    ],
)
def test_train_fails_with_one_line(small, arguments, says):
    assert says in one_line(run(*small, *arguments))


def test_a_config_that_is_none_and_a_tokenizer_that_is_not_the_models_are_one_line(small, model, data, tmp_path):
    broken = tmp_path / "config.json"
    broken.write_text("[]")
    assert "a file must be a config.json with a model_type" in one_line(run("train", "--model", broken, "--data", data))
    model.write_text(json.dumps(LLAMA | {"vocab_size": 100}))
    assert "embeddings: pass the model's own --tokenizer" in one_line(run(*small))


def test_a_folder_that_holds_something_is_never_replaced_unasked(small, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("the only copy")
    assert "is not empty: pass --resume, --overwrite or another folder" in one_line(run(*small, "--output", out))
    assert "so it holds something else: pass another folder" in one_line(run(*small, "--output", out, "--overwrite"))
    assert (out / "thesis.txt").read_text() == "the only copy"


def test_overwrite_replaces_an_earlier_run(small, tmp_path):
    out = tmp_path / "out"
    assert run(*small, "--output", out, "--steps", 2).exit_code == 0
    assert "is not empty" in one_line(run(*small, "--output", out))
    assert run(*small, "--output", out, "--steps", 1, "--overwrite").exit_code == 0
    assert len(losses(out)) == 1


def test_a_mistake_in_the_other_options_does_not_cost_the_earlier_run(small, tmp_path):
    out = tmp_path / "out"
    assert run(*small, "--output", out, "--steps", 1).exit_code == 0
    one_line(run(*small, "--output", out, "--overwrite", "--data", "absent.jsonl"))
    assert (out / "model.safetensors").exists()


def test_a_model_that_does_not_load_does_not_cost_the_earlier_run(small, model, tmp_path):
    out = tmp_path / "out"
    assert run(*small, "--output", out, "--steps", 1).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    model.write_text(json.dumps(LLAMA | {"vocab_size": 100}))
    one_line(run(*small, "--output", out, "--overwrite"))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_overwrite_removes_the_checkpoints_of_the_earlier_run_and_nobodys_files(small, tmp_path):
    out = tmp_path / "out"
    options = (*small, "--output", out, "--steps", 2)
    assert run(*options, "--save-every", 1).exit_code == 0
    mine = out / "checkpoints/step-00000002"
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]
    assert run(*options, "--save-every", 1, "--overwrite").exit_code == 0
    (mine / "notes.txt").write_text("mine")
    assert "holds files that crosspack did not write" in one_line(run(*options, "--save-every", 2, "--overwrite"))
    assert run(*options, "--overwrite").exit_code == 0
    assert [path for path in (out / "checkpoints").rglob("*") if path.is_file()] == [mine / "notes.txt"]


def test_a_typo_is_found_before_any_framework_is_imported(tmp_path):
    code = (
        "import sys, runpy; sys.argv = ['crosspack', *sys.argv[1:]]\n"
        "try: runpy.run_module('crosspack', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'jax', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    (tmp_path / "data.jsonl").write_text('{"txt": "a misspelt column"}')
    for command, mistake in (
        (["train"], ["--data", "absent.jsonl"]),
        (["train"], ["--data", "data.jsonl"]),
        (["train"], ["--tokenizer", "./absent"]),
        (["train"], ["--output", "data.jsonl"]),
    ):
        result = subprocess.run(
            [sys.executable, "-c", code, *command, *mistake], capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        assert result.returncode == 2, result.stderr
        assert result.stdout.strip() == "[]", (command, mistake)


def test_a_contaminated_model_ends_with_an_error(small, monkeypatch):
    from crosspack.cli import train
    from packing_core.training import job

    def contaminated(wanted):
        records = [wanted.record("packed", step, 1.0, 0.1) for step in range(len(wanted.schedule))]
        return job.TrainResult({"packed": records}, job.Audit(False, "logits 3e-01"), "abacus", "beads")

    monkeypatch.setattr(train, "trainer", lambda backend: contaminated)
    assert "audit: documents that are packed together see each other: logits 3e-01" in one_line(run(*small))


def test_a_run_that_never_began_can_be_begun_again(small, tmp_path):
    out = tmp_path / "out"
    one_line(run(*small, "--output", out, "--attention", "abacus"))
    assert run(*small, "--output", out, "--steps", 1).exit_code == 0


def test_a_hub_name_is_found_in_the_hub_cache(small, data, tmp_path):
    out, cache = tmp_path / "out", tmp_path / "cache"
    assert run(*small, "--output", out, "--steps", 1).exit_code == 0
    snapshot = cache / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(out, snapshot)
    (cache / "models--owner--name" / "refs").mkdir()
    (cache / "models--owner--name" / "refs" / "main").write_text("0123")
    command = ["train", "--model", "owner/name", "--data", str(data), "--capacity", "64", "--steps", "1"]
    result = subprocess.run(
        [sys.executable, "-m", "crosspack", *command, "--device", "cpu", "--output", str(tmp_path / "again")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "owner/name on" in result.stdout
    assert losses(tmp_path / "again")[0] < losses(out)[0] - 0.2  # it starts from what was trained


def test_it_refuses_to_run_once_per_rank(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process" in one_line(run(*small))


def test_the_installed_command_fails_with_one_line_too(tmp_path):
    command = [sys.executable, "-m", "crosspack", "report", "--data", str(tmp_path / "absent.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("crosspack: --data ")
    assert len(result.stderr.strip().splitlines()) == 1
