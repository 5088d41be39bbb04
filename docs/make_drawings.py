"""Draws the charts and diagrams of docs/*.md into docs/images: ``python -m docs.make_drawings``.

    tables of benchmarks/RESULTS.md  -> docs/site/charts.py   -> docs/images/chart-NAME.svg
    runs in docs/results             -> docs/site/study.py    -> docs/images/chart-NAME.svg
    what the code computes           -> docs/site/diagrams.py -> docs/images/diagram-NAME.svg

A test compares the files with what is drawn, so run this after a change of either.
"""

from __future__ import annotations

from pathlib import Path

from docs.site.charts import CHARTS, draw
from docs.site.diagrams import DIAGRAMS
from docs.site.study import PICTURES

FOLDER = Path(__file__).with_name("images")


def drawings() -> dict[str, str]:
    """Returns every drawing by the name of its file."""
    charts = {f"chart-{name}.svg": draw(name) for name in CHARTS}
    charts |= {f"chart-{name}.svg": function() for name, function in PICTURES.items()}
    return charts | {f"diagram-{name}.svg": function() for name, function in DIAGRAMS.items()}


if __name__ == "__main__":
    for name, drawn in drawings().items():
        (FOLDER / name).write_text(drawn)
