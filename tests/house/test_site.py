"""The drawings of the documentation show what they say. ``make docs`` builds the site and checks its links."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from docs.make_drawings import FOLDER, drawings
from docs.site import diagrams

PAGES = "\n".join(path.read_text() for path in (diagrams.ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return drawings()


def test_pages_show_every_drawing_and_no_other(drawn: dict[str, str]) -> None:
    """As pictures, so that a code host shows them too; comments that the site replaced were invisible there."""
    shown = re.findall(r"^!\[(.+)\]\(images/((?:chart|diagram)-\w+\.svg)\)$", PAGES, flags=re.MULTILINE)
    assert sorted(name for _, name in shown) == sorted(drawn)
    for alternative, name in shown:
        described = ElementTree.fromstring(drawn[name]).attrib["aria-label"]
        assert described.partition(": ")[0] == alternative, name


def test_the_pictures_are_those_that_the_script_draws(drawn: dict[str, str]) -> None:
    stored = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    old = [name for name in drawn.keys() | stored.keys() if drawn.get(name) != stored.get(name)]
    assert not old, f"python -m docs.make_drawings, for {', '.join(old)}"
