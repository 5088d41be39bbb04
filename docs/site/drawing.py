"""SVG drawings for the documentation site: shapes in, one ``<figure>`` out, which a page contains as it is.

Text and lines take the colour of the page's text, so that a drawing is legible on a light and on a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

OWN, OTHER, PADDING = "#2f6db3", "#c0392b", "#9a9a9a55"
SEGMENTS = (OWN, "#7fb0dd", "#4a90c9", "#a9cbe8")  # neighbouring segments must not look alike
FONT = 13


@dataclass
class Drawing:
    """A canvas of ``width`` x ``height`` units, about pixels on a wide screen; y grows downwards.

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
        self, x: float, y: float, words: object, *, anchor: str = "start", size: float = FONT,
        colour: str = "currentColor", bold: bool = False, code: bool = False,
    ) -> None:  # fmt: skip
        """Write on the baseline ``y``; ``anchor`` says what of the text stands at ``x``: start, middle or end."""
        style = (' font-weight="bold"' if bold else "") + (' font-family="monospace"' if code else "")
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"{style}>'
            f"{escape(str(words))}</text>"
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._shapes.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="currentColor" '
            'marker-end="url(#arrowhead)"/>'
        )

    def figure(self, caption: str = "") -> str:
        """The drawing as one HTML element without blank lines, which Markdown leaves alone."""
        head = (
            '<defs><marker id="arrowhead" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>'
        )
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        return (
            f'<figure><svg viewBox="0 0 {self.width:g} {self.height:g}" style="width:100%;max-width:{self.width:g}px" '
            f'role="img" aria-label="{escape(self.description)}" font-family="sans-serif">'
            f"{head}{''.join(self._shapes)}</svg>{below}</figure>"
        )


def bars(title: str, measured: list[tuple[str, float, str]], *, highlight: str, caption: str) -> str:
    """Bars from 0, one per (label, value, value as text); blue where the label contains ``highlight``."""
    left, right, height = 330, 560, 26
    drawing = Drawing(
        left + right + 110, 34 + height * len(measured), f"{title}: " + "; ".join(f"{a}: {c}" for a, _, c in measured)
    )
    drawing.text(0, 16, title, bold=True)
    largest = max(value for _, value, _ in measured)
    for place, (label, value, words) in enumerate(measured):
        y = 28 + place * height
        drawing.text(left - 8, y + 15, label, anchor="end")
        drawing.box(left, y, right * value / largest, height - 7, OWN if highlight in label else PADDING)
        drawing.text(left + right * value / largest + 6, y + 15, words)
    return drawing.figure(caption)
