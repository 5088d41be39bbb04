"""SPEC.md as data: every requirement's id, the method it is about, and whether a backend may declare it away."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packing_core.protocol import LEVELS

SPEC = Path(__file__).parent / "SPEC.md"
_ROW = re.compile(r"^\| ([A-Z]+-\d\d) \| (\w+) \| (required|optional) \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Requirement:
    """One row of SPEC.md.

    Attributes:
        method: the method of `packing_core.protocol.Backend` that it is about.
        need: "required": every backend that has the method; "optional": it may be declared away.
        text: the requirement in one sentence.
        level: collator, operation, model or trainer.
    """

    method: str
    need: str
    text: str
    level: str


@cache
def requirements() -> dict[str, Requirement]:
    """Id -> requirement, in the order of the document."""
    level_of = {method: level for level, methods in LEVELS.items() for method in methods}
    return {
        name: Requirement(method, need, text, level_of[method])
        for name, method, need, text in _ROW.findall(SPEC.read_text(encoding="utf-8"))
    }
