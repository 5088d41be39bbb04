"""CONTRIBUTING.md: every path that it names exists, and its order of imports is the one that the tests hold."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_layers import FLOORS, PACKAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_path_exists() -> None:
    named = re.findall(r"`([\w.]+/[\w./]*)`", PAGE)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert len(named) > 30 and not missing


def test_the_packages_and_what_they_may_import_are_those_of_the_tests() -> None:
    rows = re.findall(r"^\| `(\w+)/` \| .* \| (.*)\|$", PAGE, flags=re.MULTILINE)
    assert {package: set(re.findall(r"\w+", allowed)) for package, allowed in rows} == PACKAGES


def test_the_parts_of_torch_backend_stand_in_the_order_of_their_imports() -> None:
    (listed,) = re.findall(r"^```\n(pieces\.py.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [line.split()[0].rstrip("/").removesuffix(".py") for line in listed.splitlines()] == FLOORS


def test_commits_are_checked_by_the_ruff_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
