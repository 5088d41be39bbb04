"""SVG drawings for the documentation: shapes in, one SVG file out, which a page shows as a picture.

A drawing is as wide as a page's text and its words are as large, on a code host and on the site. Its ground is white,
so that it is legible on a dark page too, which a picture knows nothing of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

OWN, OTHER, PADDING = "#2f6db3", "#c0392b", "#9a9a9a55"
SEGMENTS = (OWN, "#7fb0dd", "#4a90c9", "#a9cbe8")  # neighbouring segments must not look alike
WIDTH = 690  # of a page's text, in pixels
FONT, CODE = 16, 14  # of a page's text and of code in it, in pixels
MARGIN, LINE = 12, 22
CHARACTER, BOLD = 9.3, 10.2  # of a letter in the widest of the usual fonts, on average, in pixels

Point = tuple[float, float]


@dataclass
class Drawing:
    """A canvas of ``width`` x ``height`` pixels, at most ``WIDTH`` wide; y grows downwards.

    Attributes:
        description: what the drawing shows, for readers who do not see it.
    """

    width: float
    height: float
    description: str
    _shapes: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", *, outline: bool = False
    ) -> None:
        line = ' stroke="currentColor" stroke-width="1"' if outline else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" rx="2"{line}/>'
        )

    def text(
        self, x: float, y: float, words: object, *, anchor: str = "start",
        colour: str = "currentColor", bold: bool = False, code: bool = False,
    ) -> None:  # fmt: skip
        """Write on the baseline ``y``; ``anchor`` says what of the text stands at ``x``: start, middle or end."""
        style = (' font-weight="bold"' if bold else "") + (' font-family="monospace"' if code else "")
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{CODE if code else FONT}" fill="{colour}"'
            f"{style}>{escape(str(words))}</text>"
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._shapes.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="currentColor" '
            'marker-end="url(#arrowhead)"/>'
        )

    def line(self, points: Sequence[Point], colour: str, *, width: float = 2, dashed: bool = False) -> None:
        style = ' stroke-dasharray="5 5"' if dashed else ""
        self._shapes.append(
            f'<polyline points="{_places(points)}" fill="none" stroke="{colour}" stroke-width="{width:g}"{style}/>'
        )

    def area(self, points: Sequence[Point], fill: str) -> None:
        self._shapes.append(f'<polygon points="{_places(points)}" fill="{fill}"/>')

    def svg(self, caption: str) -> str:
        """Returns the file: the drawing, and the caption below it in as many lines as it takes.

        Raises:
            ValueError: the drawing is wider than a page's text, so its words would be smaller.
        """
        if self.width > WIDTH:
            raise ValueError(f"{self.description}: {self.width:g} pixels, and a page's text is {WIDTH} wide")
        lines = wrap(caption, int(WIDTH / CHARACTER))
        for place, words in enumerate(lines):
            self.text(0, self.height + LINE * (place + 1), words, colour="#59636e")
        height = self.height + LINE * len(lines) + 8
        width, tall = WIDTH + 2 * MARGIN, height + 2 * MARGIN
        head = (
            '<defs><marker id="arrowhead" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>'
        )
        ground = f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{width}" height="{tall:g}" rx="6" fill="white"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{tall:g}" '
            f'viewBox="{-MARGIN} {-MARGIN} {width} {tall:g}" role="img" aria-label="{escape(self.description)}" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" color="#1f2328">\n'
            + "\n".join((head, ground, *self._shapes))
            + "\n</svg>\n"
        )


def _places(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def bars(title: str, measured: list[tuple[str, float, str]], *, highlight: str, caption: str) -> str:
    """Bars from 0, one per (label, value, value as text); blue where the label contains ``highlight``."""
    titles, height = wrap(title, int(WIDTH / BOLD)), 30
    left = CHARACTER * max(len(label) for label, _, _ in measured) + 8
    right, top = WIDTH - left - 90, LINE * len(titles) + 10
    described = f"{title}: " + "; ".join(f"{label}: {words}" for label, _, words in measured)
    drawing = Drawing(WIDTH, top + height * len(measured), described)
    for place, words in enumerate(titles):
        drawing.text(0, LINE * (place + 1) - 6, words, bold=True)
    largest = max(value for _, value, _ in measured)
    for place, (label, value, words) in enumerate(measured):
        y = top + place * height
        drawing.text(left - 8, y + 17, label, anchor="end")
        drawing.box(left, y, right * value / largest, height - 7, OWN if highlight in label else PADDING)
        drawing.text(left + right * value / largest + 6, y + 17, words)
    return drawing.svg(caption)
