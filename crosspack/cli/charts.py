"""Charts as inline SVG, each with the table that says the same: numbers in, HTML text out.

An SVG is 400 units wide, so its text is readable on a phone, and its colours are the page's CSS variables. It is one
image to a screen reader, named by its title; what it shows can be read in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import count
from typing import NamedTuple

WIDTH = 400
_LINE, _BAR = 16, 14  # heights of a line of text and of a bar
_numbers = count(1)


class Bar(NamedTuple):
    """One bar: ``filled`` of ``length`` is drawn strong, the rest weak; ``note`` stands at its end."""

    label: str
    length: float
    filled: float
    note: str = ""
    colour: str = "main"


class Segment(NamedTuple):
    """A document's tokens in a row, and the runs of them that carry loss, from the start of the segment."""

    document: int
    begin: int
    length: int
    trained: list[tuple[int, int]]


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names its rows."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table><caption>'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(drawing: str, caption: str, shown: str) -> str:
    """A drawing and, behind a button, its table."""
    return (
        f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption><details><summary>Numbers of this chart</summary>"
        f"{shown}</details></figure>"
    )


def bars(title: str, given: Sequence[Bar]) -> str:
    """Bars one below the other, each under its label."""
    longest = max(bar.length for bar in given) or 1.0
    parts = []
    for number, bar in enumerate(given):
        top = number * (_LINE + _BAR + 8)
        parts.append(f'<text x="0" y="{top + 12}">{escape(bar.label)}</text>')
        parts.append(f'<text x="{WIDTH}" y="{top + 12}" class="end">{escape(bar.note)}</text>')
        parts.append(_rect(0, top + _LINE, WIDTH * bar.length / longest, _BAR, "rest"))
        parts.append(_rect(0, top + _LINE, WIDTH * bar.filled / longest, _BAR, bar.colour))
    return _svg(title, len(given) * (_LINE + _BAR + 8), parts)


def columns(title: str, heights: Sequence[float], ticks: Sequence[tuple[float, str]], mark: float | None = None) -> str:
    """A histogram of columns of equal width.

    Args:
        ticks: labels below, each with its place from 0 to 1.
        mark: the place of a dashed line.
    """
    tall, top = 140.0, max(heights) or 1.0
    wide = WIDTH / len(heights)
    parts = [
        _rect(i * wide + 0.5, tall - tall * height / top, wide - 1, tall * height / top, "main")
        for i, height in enumerate(heights)
        if height
    ]
    parts.append(f'<line x1="0" x2="{WIDTH}" y1="{tall}" y2="{tall}"/>')
    if mark is not None and 0 <= mark <= 1:
        parts.append(f'<line x1="{mark * WIDTH:.1f}" x2="{mark * WIDTH:.1f}" y1="0" y2="{tall}" class="mark"/>')
    for place, label in ticks:
        side = "start" if place < 0.08 else "end" if place > 0.92 else "middle"
        parts.append(f'<text x="{place * WIDTH:.1f}" y="{tall + 16}" class="{side}">{escape(label)}</text>')
    return _svg(title, tall + 22, parts)


def rows(title: str, given: Sequence[Sequence[Segment]], capacity: int) -> str:
    """Packed rows: segments in two colours by turns, those of their tokens that carry no loss striped."""
    parts, scale = [], WIDTH / capacity
    for number, segments in enumerate(given):
        top = number * (_BAR + 4)
        parts.append(_rect(0, top, WIDTH, _BAR, "rest"))
        for place, segment in enumerate(segments):
            said = (
                f"row {number}, document {segment.document}: {segment.length:,} tokens, {_trained(segment):,} with loss"
            )
            inside = [_rect(segment.begin * scale, top, max(segment.length * scale - 0.6, 0.4), _BAR, "silent")]
            inside += [
                _rect((segment.begin + begin) * scale, top, max((end - begin) * scale - 0.6, 0.4), _BAR, shade)
                for begin, end in segment.trained
                for shade in (("main", "other")[place % 2],)
            ]
            parts.append(f"<g><title>{escape(said)}</title>{''.join(inside)}</g>")
    return _svg(title, len(given) * (_BAR + 4), parts)


def rows_table(caption: str, given: Sequence[Sequence[Segment]]) -> str:
    """Describes the picture of :func:`rows` as a table."""

    def lines() -> Iterator[list[str]]:
        for number, segments in enumerate(given):
            for segment in segments:
                numbers = (segment.document, segment.begin, segment.length, _trained(segment))
                yield [f"row {number}", *(f"{value:,}" for value in numbers)]

    return table(caption, ["", "document", "first column", "tokens", "with loss"], list(lines()))


def _trained(segment: Segment) -> int:
    return sum(end - begin for begin, end in segment.trained)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    name = f"chart-{next(_numbers)}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="{name}">'
        f'<title id="{name}">{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" class="{kind}"/>'
