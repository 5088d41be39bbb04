"""Deliberately wrong backends: each breaks one thing of the reference and names the requirement that must reject it.

``pytest conformance/ --mutants`` judges every mutant by the tests of that requirement and fails if one survives; a
single one runs through the whole suite with ``--backend conformance.mutants:NAME``.
"""

from conformance.mutants import attention, collator, combined, experts, larger, model, operations, scans, trainer
from conformance.mutants import reductions as documents
from conformance.mutants.base import MUTANTS, Mutant

globals().update(MUTANTS)

__all__ = [
    "MUTANTS",
    "Mutant",
    "attention",
    "collator",
    "combined",
    "documents",
    "experts",
    "larger",
    "model",
    "operations",
    "scans",
    "trainer",
]
