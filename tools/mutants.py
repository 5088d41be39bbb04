"""Random mutants of the source: one changed place each, which some test should notice.

    python -m tools.mutants --seed 61 --count 300 --list         # places and changes, uniform over all
    python -m tools.mutants --seed 61 --count 300 --tree COPY -- python -m pytest tests --tier quick -x -q

The second form changes a copy of the repository, one mutant at a time, and runs the command there. A mutant is killed
if the command fails or takes longer than ``--limit``; what survives is printed with its change.

Changed are comparisons, ``and``/``or``, ``not``, arithmetic, numbers by one, True/False, statements (to ``pass``),
results (to None), conditions (forced), ``break``/``continue``, ``min``/``max``, and the bounds of slices by one. Left
out are docstrings, annotations, decorators, what is raised and logged, assertions, ``TYPE_CHECKING`` and `GPU_ONLY`.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("packing_core", "torch_backend", "jax_backend", "conformance", "crosspack")
# Kernels that no CPU runs: Mosaic on Hopper's instructions. Those of Triton and Pallas are interpreted.
GPU_ONLY = ("jax_backend/attention/mosaic_forward.py", "jax_backend/attention/mosaic_backward.py")
COMPARISONS = {"==": "!=", "<": "<=", ">": ">=", "is": "is not", "in": "not in"}
COMPARISONS |= {after: before for before, after in COMPARISONS.items()}
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "*", "|": "&", "&": "|", "<<": ">>", ">>": "<<"}
SWAPPED = {"break": "continue", "continue": "break", "min": "max", "max": "min", "and": "or", "or": "and"}
SILENT = re.compile(r"(log|logger|logging|_log|_logger)\.")


@dataclass(frozen=True)
class Mutant:
    """One change: ``before`` at ``start`` of a file's text becomes ``after``."""

    file: str
    line: int
    start: int
    before: str
    after: str

    def __str__(self) -> str:
        short = [text if len(text) < 70 else text[:66] + " ..." for text in (self.before, self.after)]
        return f"{self.file}:{self.line}: {short[0]!r} -> {short[1]!r}"

    def applied(self, text: str) -> str:
        """Returns a file's text with the change."""
        stop = self.start + len(self.before)
        assert text[self.start : stop] == self.before, self
        return text[: self.start] + self.after + text[stop:]


class _Places(ast.NodeVisitor):
    """Collects the mutants of a file, in the order of its text."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.found = file, text, list[Mutant]()
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()
        self.depth = 0  # of functions around

    def place(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def add(self, start: int, before: str, after: str) -> None:
        self.found.append(Mutant(self.file, self.text.count("\n", 0, start) + 1, start, before, after))

    def replace(self, node: ast.expr | ast.stmt, after: str) -> None:
        start, stop = self.span(node)
        self.add(start, self.text[start:stop], after.format(self.text[start:stop]))

    def between(self, left: ast.expr, right: ast.expr, table: dict[str, str]) -> None:
        start, stop = self.span(left)[1], self.span(right)[0]
        names = "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in sorted(table, key=len, reverse=True))
        code = re.sub(r"#.*", lambda comment: " " * len(comment[0]), self.text[start:stop])
        if match := re.search(rf"(?<!\w)({names})(?!\w)", code):
            self.add(start + match.start(), match[0], table[" ".join(match[0].split())])

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators):
            self.between(left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, SWAPPED)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.left, ast.JoinedStr) and not isinstance(node.op, ast.Pow | ast.MatMult):
            self.between(node.left, node.right, ARITHMETIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            start, stop = self.span(node)
            negated = self.text[start:stop]
            self.add(start, negated, negated.removeprefix("not").removeprefix("-").strip())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            sign = "+" if (node.lineno + node.col_offset) % 2 or node.value in (0, 2) else "-"
            self.replace(node, f"({{}} {sign} 1)")

    def visit_Call(self, node: ast.Call) -> None:
        if SILENT.match(ast.unparse(node.func)):
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self.replace(node.func, SWAPPED[node.func.id])
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.replace(bound, "({}) + 1")
        self.generic_visit(node)

    def condition(self, node: ast.If | ast.IfExp) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        self.replace(node.test, "True" if (node.test.lineno + node.test.col_offset) % 2 else "False")
        self.generic_visit(node)

    visit_If = visit_IfExp = condition

    def statement(self, node: ast.Break | ast.Continue | ast.Return | ast.Expr | ast.Assign | ast.AugAssign) -> None:
        if isinstance(node, ast.Break | ast.Continue):
            self.replace(node, SWAPPED["break" if isinstance(node, ast.Break) else "continue"])
        elif isinstance(node, ast.Return):
            if node.value is not None and not isinstance(node.value, ast.Constant):
                self.replace(node.value, "None")
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):
                return  # a docstring
            if isinstance(node.value, ast.Call) and not SILENT.match(ast.unparse(node.value.func)):
                self.replace(node, "pass")
        elif self.depth:
            self.replace(node, "pass")
        elif isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
            return
        self.generic_visit(node)

    visit_Break = visit_Continue = visit_Return = visit_Expr = visit_Assign = visit_AugAssign = statement

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for value in [*node.args.defaults, *node.args.kw_defaults]:
            if value is not None:
                self.visit(value)
        self.depth += 1
        for each in node.body:
            self.visit(each)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)

    def left_out(self, node: ast.AST) -> None:
        """Error texts, assertions, and texts with values in them."""

    visit_Raise = visit_Assert = visit_JoinedStr = left_out


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Returns all mutants of a file. A few do not parse."""
    places = _Places(file, text)
    places.visit(ast.parse(text))
    return places.found


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draws mutants of all packages that parse, every place as likely as any other."""
    found = list[Mutant]()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if (file := path.relative_to(ROOT).as_posix()) not in GPU_ONLY:
            found += mutants_of(file, path.read_text())
    random.Random(seed).shuffle(found)
    return list(islice(filter(_parses, found), count))


def _parses(mutant: Mutant) -> bool:
    try:
        ast.parse(mutant.applied((ROOT / mutant.file).read_text()))
    except SyntaxError:
        return False
    return True


def survives(mutant: Mutant, tree: Path, command: Sequence[str], limit: float) -> bool:
    """Returns whether a command succeeds within ``limit`` seconds in a copy of the repository that holds the mutant."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(mutant.applied(text))
    try:
        return subprocess.run(command, cwd=tree, capture_output=True, timeout=limit, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random mutants of the source.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--list", action="store_true", help="only the places and the changes")
    parser.add_argument("--tree", type=Path, help="a copy of the repository, to change")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; a command that takes longer has failed")
    parser.add_argument("command", nargs="*", help="what judges, after --")
    options = parser.parse_args(arguments)
    mutants = drawn(options.seed, options.count)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    if options.tree is None or not options.command:
        parser.error("--tree COPY -- COMMAND, or --list")
    left = 0
    for mutant in mutants:
        if survives(mutant, options.tree.resolve(), options.command, options.limit):
            left += 1
            print(f"survives: {mutant}", flush=True)
    print(f"{len(mutants) - left} of {len(mutants)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
