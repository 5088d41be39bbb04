"""``crosspack recipes``: every file of options is listed, written, and trains a tiny model as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosspack.cli.recipes import about, texts
from tests.cli.console import done, one_line, run
from tests.cli.test_tasks import RECORDS, weights  # noqa: F401  (a fixture)

NAMES = [*texts()]
RECIPES = [pytest.param(name, marks=() if name in ("sft-lora-8b-24gb",) else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_a_tiny_model(name, weights, write, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    task = name if name in RECORDS else "sft"
    file = Path("mine.yaml")
    done("recipes", name, "--output", file)
    records = RECORDS.get(task) or [{"prompt": "question:", "completion": " The quick brown fox."}] * 16
    data = [write(part, records) for part in ("data.jsonl", "held.jsonl")]
    Path("rewards.py").write_text("def score(completions, **_):\n    return [float(len(x)) for x in completions]\n")
    small = ("--model", weights, "--data", data[0], "--steps", 1, "--device", "cpu", "--dtype", "float32")
    small += ("--precision", "float32") if "precision" in file.read_text() else ()
    small += ("--capacity", 64) if "capacity" in file.read_text() else ()
    small += ("--eval-data", data[1]) if "eval-data" in file.read_text() else ()
    generated = ("--set", "max_completion_length=8", "--set", "num_generations=2", "--batch-size", 4)
    small += generated if task == "grpo" else ()
    text = file.read_text().replace("master-weights: true\n", "")  # of bfloat16 weights, which the CPU takes long for
    file.write_text(text)
    result = done("train", "--config", file, *small)
    assert "audit: exact" in result.output
    assert any(Path("runs").glob("*/*.safetensors"))


def test_recipes_are_listed_with_what_they_are_for(tmp_path):
    listed = run("recipes").output
    for name, text in texts().items():
        assert name in listed
        assert about(text) in listed
    assert run("recipes", NAMES[0]).output == texts()[NAMES[0]]
    assert "no recipe ppo: there are classify, dpo" in one_line(run("recipes", "ppo"))
    assert "say which recipe" in one_line(run("recipes", "--output", tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").touch()
    assert "exists: name another file" in one_line(run("recipes", "dpo", "--output", tmp_path / "a.yaml"))
