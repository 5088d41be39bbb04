"""The drawings of the documentation site show what they say. ``make docs`` builds the site and checks its links."""

from __future__ import annotations

import re

import numpy as np
import pytest

from docs.site import charts, diagrams

PAGES = "\n".join(path.read_text() for path in (diagrams.ROOT / "docs").glob("*.md"))


def test_pages_name_every_drawing_and_no_other() -> None:
    named = re.findall(r"^<!-- (diagram|chart): (\w+) -->$", PAGES, flags=re.MULTILINE)
    assert {name for kind, name in named if kind == "diagram"} == set(diagrams.DIAGRAMS)
    assert {name for kind, name in named if kind == "chart"} == set(charts.CHARTS)


def test_the_document_mask_hides_what_the_causal_mask_shows() -> None:
    documents = np.repeat([1, 2, 3], [5, 3, 4])
    causal = np.tri(12, dtype=bool)
    np.testing.assert_array_equal(diagrams.visible(np.ones(12, int)), causal)
    np.testing.assert_array_equal(diagrams.visible(documents), causal & (documents[:, None] == documents))


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_has_a_bar_for_each_of_its_rows(name: str) -> None:
    chart, drawn = charts.CHARTS[name], charts.draw(name)
    for label, words in chart.rows.items():
        assert f">{label}</text>" in drawn and f">{charts.value_of(chart.section, chart.column, words)}</text>" in drawn


def test_a_row_that_is_no_longer_measured_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row of short lognormal and no such packer under 'ms'"):
        charts.value_of("Planner", "ms", ("short lognormal", "no such packer"))


def test_a_drawing_is_one_block_of_html() -> None:
    for draw in diagrams.DIAGRAMS.values():
        figure = draw()
        assert figure.startswith("<figure>") and figure.endswith("</figure>") and "\n\n" not in figure
