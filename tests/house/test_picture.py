"""The README's picture shows what it says it shows, and is small enough to load at once."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"
MAX_BYTES = 150_000
ROUNDING = 1e-5  # of the largest logit, float32


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(DOCS / "make_pictures.py"))


@pytest.fixture(scope="module")
def measured(script) -> dict:
    return {found.title: found for found in script["measure"]()}


def test_stock_packing_lets_documents_change_each_other(measured) -> None:
    stock = measured["stock packing"]
    assert stock.error > 0.1 and stock.leak > 0.1


def test_crosspack_gives_what_each_document_alone_gives(measured) -> None:
    alone, packed = measured["each document alone"], measured["crosspack"]
    assert packed.error < ROUNDING and packed.leak < ROUNDING
    np.testing.assert_allclose(packed.effects, alone.effects, atol=ROUNDING)


def test_no_output_depends_on_a_later_token(measured) -> None:
    for found in measured.values():
        assert np.triu(found.effects, 1).max() < ROUNDING < np.diag(found.effects).min()


def test_the_picture_is_small(script, measured, tmp_path) -> None:
    drawn = tmp_path / "packing.png"
    script["draw"](drawn, np.arange(20, 200), list(measured.values()))
    for picture in (drawn, DOCS / "images" / "packing.png"):
        assert 10_000 < picture.stat().st_size < MAX_BYTES
