"""docs/architecture.md: its tree has a line for every package, and every path that it names exists."""

from __future__ import annotations

import re

from tests.imports import PACKAGES, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def listed(block: str) -> list[str]:
    """Returns the folders of a tree, whose depth is its indentation by two spaces."""
    found, path = [], []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = [*path[:depth], line.split()[0].rstrip("/")]
        found.append("/".join(path))
    return found


def test_the_tree_has_every_package_once_and_nothing_else() -> None:
    (block,) = re.findall(r"^```text\n(packing_core/.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    packages = {
        file.parent.relative_to(ROOT).as_posix() for top in PACKAGES for file in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(listed(block)) == sorted(packages)


def test_every_path_exists() -> None:
    named = re.findall(r"`((?:" + "|".join(PACKAGES) + r")(?:/[\w./]*)?)`", PAGE)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert len(named) > 20 and not missing
