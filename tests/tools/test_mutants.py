"""Random mutants: each changes what a file computes, and a command judges them in a copy."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tools import mutants

CODE = """def first(rows: list[int], stop: int = 3, last: bool = True) -> int:
    # a < b in a comment
    for row in rows[:stop]:
        if row < 2 and not last:
            break
        show(row)
    return min(rows) + stop
"""
TALK = '''"""Adds 1."""

__all__ = ["a", "b"][:2]


def check(x: Literal[3]) -> None:
    """Raises if 1 + 1."""
    assert x == 3
    log.info("took %d s", 1 + 2)
    raise ValueError(f"{x + 1} is not 3" + " or 4")
'''


def test_each_kind_of_place_is_changed() -> None:
    found = {(mutant.line, mutant.before, mutant.after) for mutant in mutants.mutants_of("a.py", CODE)}
    assert {
        (1, "True", "False"), (3, "stop", "(stop) + 1"), (4, "<", "<="), (4, "and", "or"), (4, "not last", "last"),
        (5, "break", "continue"), (6, "show(row)", "pass"), (7, "min(rows) + stop", "None"), (7, "min", "max"),
        (7, "+", "-"),
    } <= found  # fmt: skip
    assert {before for line, before, _ in found if line in (1, 2)} == {"3", "True"}


def test_what_is_said_and_raised_is_left_out() -> None:
    assert mutants.mutants_of("a.py", TALK) == []


def test_mutants_of_the_source_mean_something_else() -> None:
    file = "packing_core/planning/order.py"
    text = (mutants.ROOT / file).read_text()
    found = mutants.mutants_of(file, text)
    meanings = {ast.dump(ast.parse(mutant.applied(text))) for mutant in found}
    assert len(meanings) > 100 and ast.dump(ast.parse(text)) not in meanings


def test_a_command_judges_a_mutant_in_a_copy_and_restores_the_copy(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = True\n")
    (mutant,) = mutants.mutants_of("a.py", path.read_text())
    for program, left in (("pass", True), ("import a; assert a.x", False), ("import a\nwhile not a.x: pass", False)):
        assert mutants.survives(mutant, tmp_path, [sys.executable, "-B", "-c", program], 5) is left
    assert path.read_text() == "x = True\n"
