"""Deliberately wrong backends: each breaks one thing of the reference and names the requirement that must reject it.

``pytest conformance/ --mutants tests.conformance.mutants`` judges every mutant by the tests of that requirement and
fails if one survives; a single one runs through the whole suite with ``--backend tests.conformance.mutants:NAME``.
"""

from importlib import import_module

from tests.conformance.mutants.base import MUTANTS

for _name in (
    "attention",
    "operations",
    "scans",
    "experts",
    "reductions",
    "collator",
    "model",
    "trainer",
    "trees",
    "context",
    "spans",
    "selection",
    "clips",
    "larger",
    "combined",
    "calls",
    "conditions",
    "sizes",
):
    import_module(f"{__name__}.{_name}")  # fills MUTANTS

globals().update(MUTANTS)

__all__ = ["MUTANTS"]
