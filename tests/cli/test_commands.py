"""The console commands as a user runs them: what they print, what they write, and how they fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import numpy as np
import pytest

from crosspack.cli.figures import compare_titles
from packing_core.training.job import Audit, TrainResult
from packing_core.training.records import StepRecord
from tests import processes
from tests.cli.conftest import LLAMA
from tests.cli.console import done, losses, one_line, run, words


def test_train_prints_the_plan_first_and_leaves_a_folder_to_go_on_with(small, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    result = done(*small, "--output", out, "--epochs", 2, "--rows-per-step", 2)
    text = result.output
    assert "BOS none, EOS <|endoftext|> (trained)" in words(result)
    for line in ("optimizer steps per epoch", "documents per step", "trained tokens per step", "efficiency"):
        assert text.index(line) < text.index("audit: exact")
    assert losses(out)[-1] < losses(out)[0] - 0.5
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("lazy dog")["input_ids"]) == "lazy dog"
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 320
    done("train", "--model", out, *small[3:], "--steps", 1, "--output", tmp_path / "again")
    assert losses(tmp_path / "again")[0] < losses(out)[0] - 0.5


def test_compare_shows_equal_losses_and_draws_the_picture(small, tmp_path):
    out = tmp_path / "out"
    result = done(*small, "--compare", "--output", out, "--padded-batch", 8)
    for line in ("real tokens/s, median step", "speed", "padding", "max loss difference from packed", "audit: exact"):
        assert line in result.output
    for other in ("padded", "grouped"):
        np.testing.assert_allclose(losses(out, other), losses(out), rtol=1e-4)
    shares = [float(share) for share in re.findall(r"([\d.]+)%", result.output.split("│ padding")[1].splitlines()[0])]
    assert shares[0] > shares[1] > shares[2]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_titles_of_a_comparison_follow_from_its_figures():
    def records(kind, seconds, loss):
        return [StepRecord(kind, step, loss, 100, 128, seconds) for step in range(3)]

    def titles(seconds):
        runs = {"padded": records("padded", 1.0, 2.0), "packed": records("packed", seconds, 2.001)}
        return compare_titles(TrainResult(runs, Audit(True, ""), "cpu", "sdpa"))

    assert titles(0.25) == ("Losses differ by 1e-03 at most", "Packed, real tokens/s: 4.00x padded")
    assert titles(2.0)[1] == "Packed, real tokens/s: 0.50x padded"  # never "in less time" when it is not


@pytest.mark.slow
def test_the_built_in_default_trains(tmp_path):
    result = done("train", "--steps", 1, "--rows-per-step", 1, "--device", "cpu", "--output", tmp_path)
    assert "a small Llama, random weights on docstrings of the Python standard library" in words(result)
    documents = int(re.search(r"│ +([\d,]+) │", result.output).group(1).replace(",", ""))
    assert 3000 < documents < 6000 and losses(tmp_path)[0] == pytest.approx(np.log(2048), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "unbroken"),
    [
        (("report",), ["documents", "longest", "computed", "padding"]),
        (("bench", "--seconds", 0), ["tokens/s", "memory", "verdict", "contaminated:"]),
        (("train", "--steps", 2, "--compare"), ["tokens/s,", "length-grouped", "difference", "efficiency"]),
    ],
    ids=["report", "bench", "train"],
)
def test_tables_fit_80_columns(arguments, unbroken, data, model, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    which = ("--tokenizer", model.parent) if arguments[0] == "report" else ("--model", model)
    result = done(*arguments, "--data", data, *which, "--capacity", 64)
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = re.findall(r"[^\s│┃(]+", result.stdout)
    assert "…" not in result.stdout and set(unbroken) <= set(found), result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "absent.jsonl"], "--data absent.jsonl: no such file or folder"),
        (["--data", "a:100:b.jsonl"], "--data a:100:b.jsonl: no such file or folder"),
        (["--data", "a.jsonl:-1"], "--data a.jsonl:-1: a weight is a number above 0: leave the data out, or give it"),
        (["--data", "a.jsonl:nan"], "--data a.jsonl:nan: a weight is a number above 0"),
        (["--data", "a.jsonl:0"], "--data a.jsonl:0: a weight is a number above 0"),
        (["--model", "./absent"], "--model ./absent: no such folder or file, and not a hub name"),
        (["--tokenizer", "./absent"], "--tokenizer ./absent: no such folder or file, and not a hub name"),
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


def test_a_folder_is_never_replaced_unasked_and_no_mistake_costs_the_earlier_run(small, model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("the only copy")
    assert "is not empty: pass --resume, --overwrite or another folder" in one_line(run(*small, "--output", out))
    assert "so it holds something else: pass another folder" in one_line(run(*small, "--output", out, "--overwrite"))
    (out / "thesis.txt").rename(tmp_path / "thesis.txt")
    one_line(run(*small, "--output", out, "--attention", "abacus"))
    assert run(*small, "--output", out, "--steps", 2).exit_code == 0, "a run that never began can be begun again"
    assert "is not empty" in one_line(run(*small, "--output", out))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    one_line(run(*small, "--output", out, "--overwrite", "--data", "absent.jsonl"))
    model.write_text(json.dumps(LLAMA | {"vocab_size": 100}))
    one_line(run(*small, "--output", out, "--overwrite"))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    model.write_text(json.dumps(LLAMA))
    options = (*small, "--output", out, "--steps", 2)
    done(*options, "--save-every", 1, "--overwrite")
    mine = out / "checkpoints/step-00000002"
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]
    (mine / "notes.txt").write_text("mine")
    assert "holds files that crosspack did not write" in one_line(run(*options, "--save-every", 2, "--overwrite"))
    assert run(*small, "--output", out, "--steps", 1, "--overwrite").exit_code == 0 and len(losses(out)) == 1
    assert [path for path in (out / "checkpoints").rglob("*") if path.is_file()] == [mine / "notes.txt"]


MISTAKES = """
train --data absent.jsonl; train --data data.jsonl; train --tokenizer ./absent; train --output data.jsonl
train --backend abacus; train --model ./absent; train --resume; train --resume --output absent
bench --model ./absent; report --tokenizer ./absent; audit
"""


def test_a_mistake_is_reported_before_a_framework_is_imported(tmp_path):
    mistakes = [mistake.split() for line in MISTAKES.strip().splitlines() for mistake in line.split("; ")]
    code = (
        f"import sys, runpy\nfor mistake in {mistakes}:\n    sys.argv = ['crosspack', *mistake]\n"
        "    try: runpy.run_module('crosspack', run_name='__main__')\n"
        "    except SystemExit as end: print(end.code, end=' ')\n"
        "    print(sorted({'torch', 'jax', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    (tmp_path / "data.jsonl").write_text('{"txt": "a misspelt column"}')
    result = processes.run([sys.executable, "-c", code], cwd=tmp_path)
    assert result.stdout.splitlines() == ["2 []"] * len(mistakes), result.stdout + result.stderr
    assert [line.partition(": ")[0] for line in result.stderr.splitlines()] == ["crosspack"] * len(mistakes)


def test_a_contaminated_model_ends_with_an_error(small, monkeypatch):
    from crosspack.cli import traincommand
    from packing_core.training import job

    def contaminated(wanted):
        records = [wanted.record("packed", step, 1.0, 0.1) for step in range(len(wanted.schedule))]
        return job.TrainResult({"packed": records}, job.Audit(False, "logits 3e-01"), "abacus", "beads")

    monkeypatch.setattr(traincommand, "loaded", lambda entry, extra: contaminated)
    assert "audit: documents that are packed together see each other: logits 3e-01" in one_line(run(*small))


@pytest.mark.slow
def test_a_hub_name_is_found_in_the_hub_cache(small, data, tmp_path):
    out, cache = tmp_path / "out", tmp_path / "cache"
    done(*small, "--output", out, "--steps", 1)
    snapshot = cache / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(out, snapshot)
    (cache / "models--owner--name" / "refs").mkdir()
    (cache / "models--owner--name" / "refs" / "main").write_text("0123")
    command = ["train", "--model", "owner/name", "--data", str(data), "--capacity", "64", "--steps", "1"]
    result = processes.run(
        [sys.executable, "-m", "crosspack", *command, "--device", "cpu", "--output", str(tmp_path / "again")],
        env={**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "owner/name on" in result.stdout
    assert "%|" not in result.stdout + result.stderr  # no bar, transformers' neither, where the output is piped
    assert losses(tmp_path / "again")[0] < losses(out)[0] - 0.2  # it starts from what was trained


def test_data_given_several_times_is_all_read(small, write, tmp_path):
    """One after the other, or mixed by weight; in every command that reads data, and from a file of options."""
    paths = [write(f"{name}.jsonl", [{"text": f"{name} fox {n} dog"} for n in range(30)]) for name in ("a", "b")]
    model, held_out = small[2], write("held-out.jsonl", [{"text": "lazy dog"}] * 4)
    both = [f"--data={path}" for path in paths]

    def reported(*arguments):
        result = done("report", *arguments, "--tokenizer", model.parent, "--json")
        return json.loads(result.stdout)

    assert reported(*both)["documents"] == 60
    assert reported(*both)["data"] == ", ".join(map(str, paths))
    mixed = reported(f"--data={paths[0]}:1", f"--data={paths[1]}:3")
    assert 30 <= mixed["documents"] <= 45, "all of b, and a third as much of a"
    out = tmp_path / "out"
    train = ("train", "--model", model, "--capacity", 64, "--device", "cpu", "--steps", 1, "--output", out)
    result = done(*train, *both, f"--eval-data={held_out}", f"--eval-data={held_out}")
    assert f"{paths[0]}, {paths[1]}, tokenizer: " in words(result) and "8 documents in" in words(result)
    done("train", "--config", out / "run.yaml", "--output", tmp_path / "again")
    assert losses(tmp_path / "again") == losses(out)
    said = run("report", "--data", paths[0], "--data", tmp_path / "absent.jsonl")
    assert f"--data {tmp_path}/absent.jsonl: no such file or folder" in one_line(said)
    empty = write("empty.jsonl", [])
    assert f"--data {empty} has no records" in one_line(run("report", "--data", paths[0], "--data", empty))
