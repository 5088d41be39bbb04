"""The diagrams of the documentation, drawn from what the code computes: ``DIAGRAMS`` maps a name to its function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from crosspack import PackedCollator, pack
from docs.site.drawing import LINE, OTHER, OWN, PADDING, SEGMENTS, WIDTH, Drawing
from packing_core import reference
from packing_core.batches.batch import PackedBatch
from packing_core.budget import EPSILON, FACTOR, FLOOR
from tests.house.test_layers import FLOORS, PACKAGES

ROOT = Path(__file__).parents[2]
CELL = 26


def example() -> PackedBatch:
    """Four documents in two rows of eight tokens, as in docs/data.md."""
    return pack([[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34], [41, 42]], 8, seed=None)


def rows() -> str:
    """Draws a packed batch: its rows, and the arrays derived from its boundaries."""
    batch = example()
    names = ("input_ids", "segment_ids", "position_ids", "targets")
    left, between, wide = 120, 30, CELL * 2.2
    height = CELL * len(names) + between
    drawing = Drawing(left + wide * batch.capacity, height * len(batch) - 20, "Two packed rows with their arrays")
    for row in range(len(batch)):
        for line, name in enumerate(names):
            y = row * height + line * CELL
            drawing.text(left - 10, y + 18, name, anchor="end", code=True)
            for place, value in enumerate(getattr(batch, name)[row]):
                segment = int(batch.segment_ids[row, place])
                x = left + place * wide
                drawing.box(x, y, wide - 2, CELL - 2, SEGMENTS[(segment - 1) % 2] if segment else PADDING)
                colour = "white" if segment % 2 else "black"
                drawing.text(x + wide / 2, y + 18, value, anchor="middle", colour=colour)
    return drawing.svg("Four documents in two rows of 8 tokens. Padding is grey; -100 marks what is no target.")


def visible(segments: np.ndarray) -> np.ndarray:
    """[T, T]: whether the attention output at a token (first axis) changes when the value at another (second) does."""
    tokens = len(segments)
    q, k, v = np.random.default_rng(0).normal(size=(3, tokens, 1, 4))
    edges = [0, *np.flatnonzero(np.diff(segments)) + 1, tokens]
    before = reference.attention(q, k, v, edges)
    changed = np.zeros((tokens, tokens), bool)
    for place in range(tokens):
        moved = v.copy()
        moved[place] += 1
        changed[:, place] = (reference.attention(q, k, moved, edges) != before).any((1, 2))
    return changed


def mask() -> str:
    """Draws which token changes which output: the row as one document, and as the documents that it holds."""
    documents = np.repeat([1, 2, 3], [5, 3, 4])
    tokens, side = len(documents), 22
    drawing = Drawing(2 * side * tokens + 90, side * tokens + 52, "Causal mask of a row beside the document mask")
    for panel, (title, segments) in enumerate((("causal mask", np.ones(tokens, int)), ("document mask", documents))):
        x0 = panel * (side * tokens + 80)
        drawing.text(x0 + side * tokens / 2, 16, title, anchor="middle", bold=True)
        for query, key in np.argwhere(visible(segments)):
            fill = OWN if documents[query] == documents[key] else OTHER
            drawing.box(x0 + key * side, 26 + query * side, side - 2, side - 2, fill)
        drawing.text(x0 + side * tokens / 2, 26 + side * tokens + 18, "token that is replaced", anchor="middle")
    return drawing.svg(
        "A row of three documents. Each square is an output (down) that changes with a token (across), measured on the "
        "reference. Blue: of its own document. Red: of another one, which is contamination."
    )


def travel() -> str:
    """Draws how boundaries reach a layer of a transformers model: the parts on the way, and what a batch carries."""
    batch = PackedCollator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}])
    carried = [
        f"{name} {tuple(value.shape)}" if hasattr(value, "shape") else f"{name} {value}"
        for name, value in batch.items()
    ]
    stations = [
        ("PackedCollator", "torch_backend/collate", "documents of any length become one row"),
        ("the batch", None, "boundaries on the CPU, lengths as Python integers"),
        ("PackedForward", "torch_backend/hf/forward.py", "built once per call, passed as an argument"),
        ("every layer", "torch_backend/ops", "attention, rotary embedding, convolution, scan"),
        ("the loss", "torch_backend/losses", "no target crosses a boundary"),
    ]
    listed = -(-len(carried) // 2)  # lines of two columns
    heights = [58 if path else 62 + LINE * listed for _, path, _ in stations]
    drawing = Drawing(WIDTH, sum(heights) + 26 * len(stations) - 20, "From the collator to the layers and the loss")
    y = 1
    for (title, path, words), height in zip(stations, heights, strict=True):
        if path and not (ROOT / path).exists():
            raise FileNotFoundError(f"the diagram of how segments travel names {path}")
        drawing.box(1, y, WIDTH - 2, height, outline=True)
        drawing.text(14, y + 23, title, bold=True)
        drawing.text(WIDTH - 14, y + 23, path or "", anchor="end", code=True)
        drawing.text(14, y + 46, words)
        for number, held in enumerate(() if path else carried):
            column, line = divmod(number, listed)
            drawing.text(14 + column * WIDTH / 2, y + 72 + LINE * line, held, code=True)
        y += height + 26
        if title != stations[-1][0]:
            drawing.arrow(WIDTH / 2, y - 26, WIDTH / 2, y - 2)
    return drawing.svg("Documents of 4 and 3 tokens: every key of the batch with its shape or value.")


def budget() -> str:
    """The error budget of attention in each dtype, beside the error of a row whose documents see each other."""
    rng = np.random.default_rng(0)
    q, k, v = rng.integers(-64, 65, (3, 24, 2, 16)) / 64.0  # exact in every dtype
    edges = [0, 9, 16, 24]
    exact = reference.attention(q, k, v, edges)
    leak = float(np.abs(reference.attention(q, k, v, [0, 24]) - exact).max())
    measured = []
    for dtype in ("float32", "float16", "bfloat16"):
        error = np.abs(reference.attention(q, k, v, edges, dtype=dtype) - exact).max()
        rounded = float(2 ** np.ceil(np.log2(error)))  # the last digits depend on the CPU
        allowed = FACTOR * rounded + FLOOR[dtype] * EPSILON[dtype] * float(np.abs(exact).max())
        measured += [(f"{dtype}: rounding alone", rounded, PADDING), (f"{dtype}: budget", allowed, OWN)]
    measured.append(("documents that see each other", leak, OTHER))
    smallest, left, width, height = 1e-8, 278, 322, 30
    drawing = Drawing(left + width + 90, 8 + height * len(measured), "Errors of attention on a logarithmic scale")
    for place, (label, value, colour) in enumerate(measured):
        length = width * np.log10(value / smallest) / np.log10(1 / smallest)
        drawing.text(left - 8, place * height + 21, label, anchor="end")
        drawing.box(left, place * height + 4, length, height - 7, colour)
        drawing.text(left + length + 6, place * height + 21, f"{value:.1e}")
    return drawing.svg(
        "Largest error of an attention output against the float64 reference, logarithmic from 1e-8 to 1."
    )


def house() -> str:
    """The packages and what each may import, and the parts of torch_backend in the order of their imports."""
    step, tall = 30, 34
    height = tall + step * len(FLOORS) + LINE - 6
    places = {
        "crosspack": (318, 0.0),
        "torch_backend": (2, 0.45),
        "jax_backend": (140, 0.45),
        "conformance": (318, 0.45),
    }
    places["packing_core"] = (120, 1)
    if set(places) != set(PACKAGES):
        raise ValueError(f"the diagram of the house lacks packages: {set(places) ^ set(PACKAGES)}")
    drawing = Drawing(WIDTH, height, "Packages and the direction of imports")
    corners = {name: (x, 2 + share * (height - tall - 6)) for name, (x, share) in places.items()}
    for package, allowed in PACKAGES.items():
        x, y = corners[package]
        for other in sorted(allowed):
            to_x, to_y = corners[other]
            drawing.arrow(x + 66, y + tall, to_x + 66, to_y - 2)
    for package, (x, y) in corners.items():
        drawing.box(x, y, 132, tall, "white", outline=True)
        drawing.text(x + 66, y + 22, package, anchor="middle", code=True)
    drawing.text(470, 20, "inside torch_backend", bold=True)
    for place, part in enumerate(reversed(FLOORS)):
        drawing.box(470, 30 + place * step, WIDTH - 472, step - 5, outline=True)
        drawing.text((470 + WIDTH) / 2, 48 + place * step, part, anchor="middle", code=True)
    drawing.text(470, height, "each imports those below")
    drawing.height += 8
    return drawing.svg("An arrow points at what a package may import. crosspack loads the backends by name.")


DIAGRAMS: dict[str, Callable[[], str]] = {
    "rows": rows,
    "mask": mask,
    "travel": travel,
    "budget": budget,
    "house": house,
}
