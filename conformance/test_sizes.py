"""SIZE: sizes for which an implementation may hold a constant, each beyond it, and data that is special."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import sizes
from conformance.judge import Judge
from conformance.spec import requirements


def _test_of(name: str) -> Any:
    """The test of a requirement on each of its cases, of which an interpreter takes the rows."""
    cases = [
        pytest.param(case, id=label, marks=[pytest.mark.heavy] * (label != "42 rows"))
        for label, case in sizes.CASES[name].items()
    ]

    @pytest.mark.requirement(name)
    @pytest.mark.parametrize("case", cases)
    def test(judge: Judge, case: Any) -> None:
        sizes.CHECKS[requirements()[name].method](judge, case)

    return test


globals().update({f"test_{name.lower().replace('-', '_')}": _test_of(name) for name in sizes.CASES})
