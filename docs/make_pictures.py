"""Draws docs/images/packing.png, the picture of the README: ``python docs/make_pictures.py``.

    built-in data set  -> lengths -> padded batches and packed rows, one scale  -> upper half
    tiny random model  -> which token changes which output, on three paths      -> lower half

The lower half replaces each token of a packed row in turn and measures how far every output moves. The three paths are
each document alone, the row as ``transformers.DataCollatorWithFlattening`` packs it, and the row in a patched model.
All numbers in the picture are measured when it is drawn.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from transformers import DataCollatorWithFlattening

from crosspack import PackedCollator, patch, plan
from crosspack.cli.options import VOCABULARY
from crosspack.encoding.tokenizer import train_tokenizer
from crosspack.reading.corpus import standard_library_records
from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model

PICTURE = Path(__file__).with_name("images") / "packing.png"
FAMILY = "gpt_oss"  # contaminated on every stock path that ``crosspack audit`` knows
LENGTHS = (14, 8, 19, 11)  # documents of the row that is measured
SHOWN, PADDED_BATCH, CAPACITY = 48, 8, 512  # upper half: documents drawn, in padded batches and in rows

OWN, OTHER, PADDING = "#2f6db3", "#c0392b", "#e3e3e3"
SEGMENTS = (OWN, "#7fb0dd", "#4a90c9", "#a9cbe8")  # neighbouring segments must not look alike
FAINTEST = 1e-5  # of the largest logit: effects below are rounding, and white

Floats = NDArray[np.float64]
Forward = Callable[[Tensor], Tensor]  # token ids [T] -> logits [T, V]


@dataclass(frozen=True)
class Measured:
    """The effect of one way of running the documents of a row.

    Attributes:
        title: of its panel.
        error: max error of the logits / max |logits of each document alone|.
        effects: [T, T], how far the logits at each token (first axis) move when a token (second axis) is replaced, in
            units of the largest logit of the documents alone.
    """

    title: str
    error: float
    effects: Floats

    @property
    def leak(self) -> float:
        """The largest effect of a token on the outputs of another document."""
        return float(self.effects[~same_document()].max())


def same_document() -> NDArray[np.bool_]:
    """[T, T]: whether two tokens of the row belong to one document."""
    numbers = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    return numbers[:, None] == numbers[None, :]


def measure(family: str = FAMILY) -> list[Measured]:
    """Run one row on three paths of a tiny random model of ``family``: CPU, float32, train mode, default use_cache."""
    model = tiny_model(tiny_config(family_config(family))).train()
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(4, 90, (sum(LENGTHS),), generator=generator)
    flatten, pack = DataCollatorWithFlattening(), PackedCollator()

    def alone(row: Tensor) -> Tensor:
        return torch.cat([model(input_ids=document[None]).logits[0] for document in row.split(LENGTHS)])

    def stock(row: Tensor) -> Tensor:
        batch = flatten([{"input_ids": document.tolist()} for document in row.split(LENGTHS)])
        return model(**batch).logits[0]

    def packed(row: Tensor) -> Tensor:
        return model(**pack([{"input_ids": document} for document in row.split(LENGTHS)])).logits[0]

    truth = alone(row).detach()
    paths = [_measured("each document alone", alone, row, truth), _measured("stock packing", stock, row, truth)]
    patch(model)
    return [*paths, _measured("crosspack", packed, row, truth)]


@torch.no_grad()
def _measured(title: str, forward: Forward, row: Tensor, truth: Tensor) -> Measured:
    scale = truth.abs().max()
    logits = forward(row)
    effects = np.empty((len(row), len(row)))
    for place in range(len(row)):
        replaced = row.clone()
        replaced[place] = (replaced[place] + 40) % 86 + 4
        effects[:, place] = ((forward(replaced) - logits).abs().amax(-1) / scale).numpy()
    return Measured(title, float((logits - truth).abs().max() / scale), effects)


def built_in_lengths() -> NDArray[np.int64]:
    """Tokens of every document of the built-in data set, under the tokenizer that ``crosspack report`` trains on it."""
    texts = [record["prompt"] + record["completion"] for record in standard_library_records()]
    tokenizer = train_tokenizer(iter(texts), VOCABULARY)
    return np.array([len(ids) + 1 for ids in tokenizer(texts)["input_ids"]])  # 1 for the end-of-sequence token


def draw(path: Path, lengths: NDArray[np.int64], measured: list[Measured]) -> None:
    """Write the picture."""
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.35], hspace=0.04)
    documents = np.random.default_rng(0).permutation(lengths)[:SHOWN]
    left, right = upper.subplots(1, 2, sharex=True)
    _draw_padded(left, documents)
    _draw_packed(right, documents)
    for axes, found in zip(lower.subplots(1, 3), measured, strict=True):
        _draw_effects(axes, found)
    lower.supxlabel(
        "Blue: replacing a token changes outputs of its own document. Red: of another document. Differences / largest "
        f"logit.\nTiny random {FAMILY}, float32, CPU, transformers {version('transformers')}, "
        f"torch {version('torch').partition('+')[0]}; stock packing: DataCollatorWithFlattening and model(**batch).",
        fontsize=9,
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw_padded(axes: Any, documents: NDArray[np.int64]) -> None:
    longest = [documents[first : first + PADDED_BATCH].max() for first in range(0, SHOWN, PADDED_BATCH)]
    widths = np.repeat(longest, PADDED_BATCH)[:SHOWN]
    places = np.arange(SHOWN)
    axes.barh(places, widths, height=0.86, color=PADDING, label="padding")
    axes.barh(places, documents, height=0.86, color=[SEGMENTS[place % 2] for place in places], label="documents")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    _finish(axes, f"padded in batches of {PADDED_BATCH}", int(widths.sum()), int(documents.sum()))


def _draw_packed(axes: Any, documents: NDArray[np.int64]) -> None:
    rows = plan(documents, CAPACITY, overflow="split", seed=None)
    for row in range(rows.n_rows):
        axes.barh(row, CAPACITY, height=0.86, color=PADDING)
        pieces = slice(int(rows.row_offsets[row]), int(rows.row_offsets[row + 1]))
        colours = [SEGMENTS[number % len(SEGMENTS)] for number in range(pieces.stop - pieces.start)]
        axes.barh(row, rows.length[pieces], left=rows.offset[pieces], height=0.86, color=colours)
    _finish(axes, f"packed in rows of {CAPACITY}", rows.n_rows * CAPACITY, int(documents.sum()))


def _finish(axes: Any, how: str, computed: int, real: int) -> None:
    axes.set_title(
        f"{SHOWN} documents {how}:\n{computed:,} tokens computed, {1 - real / computed:.0%} padding", fontsize=10
    )
    axes.set(xlabel="tokens", xlim=(0, CAPACITY), ylim=(SHOWN - 0.5, -0.5), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_effects(axes: Any, found: Measured) -> None:
    strength = np.log10(np.maximum(found.effects, FAINTEST)) / -np.log10(FAINTEST) + 1  # 0 at FAINTEST, 1 at 1
    strength = strength.clip(0, 1)[..., None]
    colour = np.where(same_document()[..., None], to_rgb(OWN), to_rgb(OTHER))
    axes.imshow(1 - strength * (1 - colour), interpolation="nearest")
    for edge in np.cumsum((0, *LENGTHS)) - 0.5:
        axes.axhline(edge, color="black", lw=0.5)
        axes.axvline(edge, color="black", lw=0.5)
    leak = f"{found.leak:.2g}" if found.leak else "0"
    axes.set_title(f"logit error {found.error:.2g}, leak {leak}", fontsize=10)
    axes.text(0.5, 1.12, found.title, transform=axes.transAxes, ha="center", fontsize=12, fontweight="bold")
    axes.set(xlabel="token that is replaced", ylabel="output that changes")
    axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    measured = measure()
    for found in measured:
        print(f"{found.title}: logit error {found.error:.1e}, leak {found.leak:.1e}")
    draw(PICTURE, built_in_lengths(), measured)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")
