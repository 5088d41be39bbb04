"""The README and the guides are true: their blocks and commands run, their links lead somewhere, their tables hold."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks import real_weights
from crosspack.encoding.tokenizer import train_tokenizer
from crosspack.reading.corpus import standard_library_records
from packing_core.extras import MINIMUM
from tests.cli.console import run
from torch_backend.stacks.paths import config_of, survey

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
PAGES = (
    "README.md",
    "docs/batch-by-tokens.md",
    "docs/contract.md",
    "docs/faq.md",
    "docs/migration.md",
    "docs/models.md",
    "docs/shared-prefixes.md",
    "docs/start.md",
    "docs/steps.md",
    "docs/torch.md",
    "docs/trainers.md",
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with what the README calls ``my-model`` and ``my-data.jsonl``."""
    here = tmp_path_factory.mktemp("readme")
    records = [record for _, record in zip(range(60), standard_library_records(), strict=False)]
    (here / "my-data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    roles = ("user", "prompt"), ("assistant", "completion")
    chats = [[{"role": role, "content": record[name]} for role, name in roles] for record in records]
    (here / "my-chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
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
    extra = ["--overflow", "split", "--steps", "2", "--capacity", "256"] if command[1] == "train" else []
    result = run(*command[1:], *extra)
    contaminated_stock_path = command[1] == "audit"
    assert result.exit_code == int(contaminated_stock_path), result.output


def test_the_commands_from_a_clone_to_a_model_of_ones_own_chats_run(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    named = [command for command in commands("docs/start.md") if command[0] == "crosspack"]
    assert [command[1] for command in named] == ["report", "train"]
    for command in named:
        short = ["--overflow", "truncate", "--steps", "2"] if command[1] == "train" else []
        result = run(*command[1:], *short)
        assert result.exit_code == 0, result.output
    assert "audit: exact" in result.output and (folder / "runs/chats/adapter_model.safetensors").is_file()


def test_the_command_of_a_trained_models_losses_runs(folder) -> None:
    assert "`python -m benchmarks.real_weights " in README
    losses = dict(real_weights.main([str(folder / "my-model"), str(folder / "my-data.jsonl"), "--documents", "4"]))
    alone = losses["each document alone"]
    assert abs(losses["`crosspack.patch(model)`"] - alone) < 1e-5 < abs(losses["stock, flattened, plain loop"] - alone)


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as a forge makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = {command[1] for page in PAGES for command in commands(page) if command[0] == "make"}
    assert used == {"demo", "test"} and used <= targets


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))])
def test_links_between_pages_lead_somewhere(page) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([\w-]+))?\)", without_code(ROOT / page)):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{page} links to {target}#{anchor}"


def test_the_readmes_links_work_on_a_package_index() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    for link in links:
        path = re.fullmatch(rf"{REPOSITORY}/(?:blob|raw)/main/(.+)", link)
        assert path and (ROOT / path[1]).is_file(), f"the README links to {link}"


def test_the_projects_links_are_those_of_one_repository() -> None:
    assert all(link.startswith(REPOSITORY) for link in PROJECT["urls"].values())


def test_versions_are_stated_as_they_are() -> None:
    assert f"licence: {PROJECT['license']}" in README
    least = ", ".join(f"{name} {minimum}" for name, minimum in MINIMUM.items())
    python = PROJECT["requires-python"].removeprefix(">=")
    stated = f"Crosspack needs Python {python}, and where they are used {least}, or newer."
    assert stated.replace(", jax", " and jax") in " ".join(README.split())


def test_the_count_of_families_is_that_of_their_page() -> None:
    (count,) = re.findall(r"\*\*(\d+ of \d+) causal decoders are exact", (ROOT / "docs/models.md").read_text())
    assert f"[{count} are exact]" in " ".join(README.split())


def family_table() -> list[Any]:
    """Each family of the README's table with its verdicts; the first of each line stands for the others."""
    (table,) = re.findall(r"^\| family \|.*\n(?:\|.*\n)+", README, flags=re.MULTILINE)
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [
        pytest.param(family, verdicts, id=family, marks=[pytest.mark.slow] if number else [])
        for families, *verdicts in lines[2:]
        for number, family in enumerate(families.split(", "))
    ]


@pytest.mark.parametrize(("family", "stated"), family_table())
def test_the_table_of_families_is_what_the_audit_measures(family, stated) -> None:
    verdicts = {result.path: result.verdict for result in survey(config_of(family))}
    found = [verdicts[path] for path in ("position_ids", "position_ids, use_cache=False", "TRL's keys", "patched")]
    assert found == ["refused" if verdict.startswith("raises") else verdict for verdict in stated]
