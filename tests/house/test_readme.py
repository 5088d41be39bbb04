"""What the README and the guides show is executed: Python blocks, and console commands on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from crosspack.cli import app
from crosspack.cli.corpus import standard_library_records
from crosspack.cli.text import train_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/steps.md", "docs/torch.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with what the README calls ``my-model`` and ``my-data.jsonl``."""
    here = tmp_path_factory.mktemp("readme")
    records = [record for _, record in zip(range(60), standard_library_records(), strict=False)]
    (here / "my-data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    tokenizer = train_tokenizer((record["prompt"] + record["completion"] for record in records), 300)
    tokenizer.save_pretrained(here / "my-model")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(here / "my-model")
    return here


@pytest.mark.parametrize(
    ("page", "code"), [pytest.param(p, c, id=f"{p}-{i}") for p in PAGES for i, c in enumerate(blocks(p, "python"))]
)
def test_python_blocks_run(page, code, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile(code, page, "exec"), {})


def commands(page: str) -> list[list[str]]:
    lines = "\n".join(blocks(page, "console")).splitlines()
    return [line.removeprefix("$ ").split("#")[0].split() for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("command", [c for c in commands("README.md") if c[0] == "crosspack"], ids=" ".join)
def test_console_commands_run(command, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    extra = ["--overflow", "split", "--steps", "2"] if command[1] == "train" else []
    result = CliRunner().invoke(app, command[1:] + extra)
    contaminated_stock_path = command[1] == "audit"
    assert result.exit_code == int(contaminated_stock_path), result.output


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = {command[1] for page in PAGES for command in commands(page) if command[0] == "make"}
    assert used == {"demo", "test"} and used <= targets


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
