"""The drawings of the documentation show what they say. ``make docs`` builds the site and checks its links."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks._matter_figures import interval
from docs.make_drawings import FOLDER, drawings
from docs.site import charts, diagrams, study
from docs.site.drawing import BOLD, CHARACTER, CODE, FONT, MARGIN, WIDTH, Drawing

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


def test_words_are_as_large_as_the_pages_and_stand_inside_the_picture(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        picture = ElementTree.fromstring(text)
        assert picture.attrib["viewBox"].split()[2] == picture.attrib["width"] == str(WIDTH + 2 * MARGIN), name
        for words in picture.iter("{http://www.w3.org/2000/svg}text"):
            size = float(words.attrib["font-size"])
            assert size == (CODE if "font-family" in words.attrib else FONT), words.text
            letter = BOLD if "font-weight" in words.attrib else CHARACTER * size / FONT
            wide = letter * len(words.text or "")
            begin = (
                float(words.attrib["x"]) - {"start": 0, "middle": wide / 2, "end": wide}[words.attrib["text-anchor"]]
            )
            assert begin > -MARGIN and begin + wide < WIDTH + MARGIN, (name, words.text)
    with pytest.raises(ValueError, match="too wide: 691 pixels, and a page's text is 690 wide"):
        Drawing(691, 10, "too wide").svg("")


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


def test_pictures_of_the_study_show_means_and_their_intervals() -> None:
    ends = [study.runs("text")["contaminated", seed]["curve"][-1] for seed in range(5)]
    assert all(end["tokens"] > 1_250_000 for end in ends) and interval([end["loss"] for end in ends])[1] < 0.05
    assert ">154,001 ± 7,852</text>" in study.tokens_to_a_loss()
    assert ">2.88 ± 0.26</text>" in study.gradients()
    drawn = ElementTree.fromstring(study.PICTURES["text"]())
    shapes = [shape.tag.rpartition("}")[2] for shape in drawn]
    assert shapes.count("polygon") == 4, "a band for each way"
    ends_at = [line.attrib["points"].split()[-1] for line in drawn if line.tag.endswith("polyline")][-4:]
    heights = dict(
        zip(("exact", "contaminated", "wrapped", "padded"), (float(p.split(",")[1]) for p in ends_at), strict=True)
    )
    assert heights["contaminated"] < heights["wrapped"] < heights["exact"], "a higher loss stands higher"


def test_a_row_that_is_no_longer_measured_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row of short lognormal and no such packer under 'ms'"):
        charts.value_of("Planner", "ms", ("short lognormal", "no such packer"))
