"""SCAN: delta rules, the scan of Mamba-2 and short convolutions, which start anew at every segment."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.checks import check_isolated, check_padding, check_pairs
from conformance.draws import Rows
from conformance.judge import Judge
from conformance.scan_cases import (
    DELTA_PAIRS,
    EDGES,
    FOREST,
    FULL,
    MIXED,
    ON_EDGES,
    ON_EDGES_CHANGED,
    PADDED,
    PARENTS,
    ConvolutionCase,
    DeltaCase,
    SsdCase,
)
from packing_core.protocol import DTYPES

requirement = pytest.mark.requirement
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
CONTINUED = {"rows": FOREST, "parents": PARENTS}


def named(options: dict[str, Any]) -> str:
    return next(reversed(options), "plain")


LAYOUTS = pytest.mark.parametrize("rows", [FULL, PADDED], ids=["full", "padded"])
LENGTHS = pytest.mark.parametrize("rows", EDGES.values(), ids=EDGES)


@requirement("SCAN-01")
@LAYOUTS
def test_delta_rules_of_documents(judge: Judge, rows: Rows) -> None:
    judge.check(DeltaCase(rows))
    judge.check(DeltaCase(rows), only="out")


@requirement("SCAN-02")
def test_no_memory_crosses_a_boundary(judge: Judge) -> None:
    check_isolated(judge, DeltaCase(PADDED), where=(0, 2, 3))
    check_isolated(judge, DeltaCase(ON_EDGES), where=ON_EDGES_CHANGED)


@requirement("SCAN-03")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_gradients_of_the_delta_rule(judge: Judge, name: str) -> None:
    judge.check(DeltaCase(ON_EDGES), only=name)


@requirement("SCAN-04")
@LENGTHS
def test_delta_rules_of_lengths_around_chunks(judge: Judge, rows: Rows) -> None:
    judge.check(DeltaCase(rows))


@requirement("SCAN-05")
def test_padding_moves_no_delta_rule(judge: Judge) -> None:
    check_padding(judge, DeltaCase(PADDED))


@requirement("SCAN-06")
@pytest.mark.parametrize("decay", [0.0, 2.0], ids=["none", "strong"])
def test_decays_of_any_strength(judge: Judge, decay: float) -> None:
    judge.check(DeltaCase(ON_EDGES, decay=decay))


@requirement("SCAN-07")
def test_grouped_values(judge: Judge) -> None:
    judge.check(DeltaCase(FULL, heads=4))


@requirement("SCAN-08")
def test_a_decay_for_each_channel(judge: Judge) -> None:
    judge.check(DeltaCase(ON_EDGES, by_channel=True))


@requirement("SCAN-09")
def test_normalisation_by_head(judge: Judge) -> None:
    judge.check(DeltaCase(FULL, normalise=True))


@requirement("SCAN-10")
def test_every_pair_of_the_delta_rule(judge: Judge) -> None:
    check_pairs(judge, DeltaCase, DELTA_PAIRS, DTYPES)


@requirement("SCAN-11")
@LAYOUTS
def test_scans_of_mamba_2(judge: Judge, rows: Rows) -> None:
    judge.check(SsdCase(rows))
    judge.check(SsdCase(rows), only="out")


@requirement("SCAN-12")
def test_no_state_of_mamba_2_crosses_a_boundary(judge: Judge) -> None:
    check_isolated(judge, SsdCase(PADDED), where=(0, 2, 3))
    check_isolated(judge, SsdCase(ON_EDGES), where=ON_EDGES_CHANGED)


@requirement("SCAN-13")
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D"])
def test_gradients_of_mamba_2(judge: Judge, name: str) -> None:
    judge.check(SsdCase(ON_EDGES), only=name)


@requirement("SCAN-14")
@LENGTHS
def test_scans_of_mamba_2_of_lengths_around_chunks(judge: Judge, rows: Rows) -> None:
    judge.check(SsdCase(rows))


@requirement("SCAN-15")
def test_padding_moves_no_scan_of_mamba_2(judge: Judge) -> None:
    check_padding(judge, SsdCase(PADDED))


@requirement("SCAN-16")
@every_dtype
@pytest.mark.parametrize("options", [{}, CONTINUED], ids=named)
def test_scans_of_mamba_2_in_every_dtype(judge: Judge, options: dict[str, Any], dtype: str) -> None:
    judge.check(SsdCase(**{"rows": MIXED, **options}), dtype)


@requirement("SCAN-17")
@pytest.mark.parametrize("rows", [FULL, PADDED, *EDGES.values()], ids=["full", "padded", *EDGES])
def test_convolutions_of_documents(judge: Judge, rows: Rows) -> None:
    judge.check(ConvolutionCase(rows))
    judge.check(ConvolutionCase(rows), only="out")


@requirement("SCAN-18")
def test_no_convolution_reaches_over_a_boundary(judge: Judge) -> None:
    check_isolated(judge, ConvolutionCase(PADDED), where=(0, 2, 3))
    check_padding(judge, ConvolutionCase(PADDED))


@requirement("SCAN-19")
@every_dtype
@pytest.mark.parametrize("options", [{}, CONTINUED], ids=named)
def test_convolutions_in_every_dtype(judge: Judge, options: dict[str, Any], dtype: str) -> None:
    judge.check(ConvolutionCase(**{"rows": MIXED, **options}), dtype)
