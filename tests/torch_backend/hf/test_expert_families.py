"""Every family with experts is as docs/models.md says: exact, on our kernels or not, replayed or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.tables.experts import audit_family_experts
from torch_backend.auditing.tiny import all_families

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
TABLE = PAGE.partition("| experts of packed calls |")[2].partition("<!--")[0]
ROWS = {
    family: (kept, replay)
    for kept, replay, families in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE)
    for family in families.split(", ")
    if kept != "---"
}


@pytest.mark.parametrize("family", all_families())
def test_a_family_is_as_its_row_says(family: str) -> None:
    found = audit_family_experts(family)
    assert (found is not None) == (family in ROWS)
    if found is not None:
        kept, replay = ROWS[family]
        assert found.report.verdict == "exact", str(found.report)
        assert kept == ("ours" if found.kept is None else f"transformers': {found.kept}")
        assert replay == ("yes" if found.replay is None else f"refused: {found.replay}")


def test_the_page_counts_its_rows() -> None:
    ours, replayed = (sum(row[i] == text for row in ROWS.values()) for i, text in ((0, "ours"), (1, "yes")))
    assert f"Of the {len(ROWS)} families" in PAGE
    assert f"{len(ROWS)} are exact, {ours} run on our kernels and {replayed} can be replayed." in PAGE
