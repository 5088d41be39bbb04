"""The built-in data set: question and answer pairs made from the docstrings of the Python standard library.

Every machine that runs Crosspack has this text, so the first command needs no download. Source files go in, parsed with
``ast`` and never imported; records in the ``prompt`` + ``completion`` form of a data file come out, in file order, the
same on every run of the same Python.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Left out: tests, and packages that distributions ship apart or that newer Pythons no longer have.
_SKIPPED = frozenset(
    ["__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "tkinter"]
    + ["turtledemo", "lib2to3", "distutils", "ensurepip", "pydoc_data"]
)
_SHORTEST_ANSWER = 32  # characters; shorter docstrings ("Return repr(self).") teach nothing

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def standard_library_records(root: Path | None = None) -> Iterator[dict[str, str]]:
    """Yield ``{"prompt", "completion"}`` for every public docstring below ``root``; equal docstrings once.

    Args:
        root: a folder of Python sources; by default the running interpreter's standard library.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.intersection(parts) or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            parsed = _parse(path)
        except (SyntaxError, ValueError, RecursionError):  # not a source of this Python: it documents nothing
            continue
        for node, name in _documented(parsed, module):
            answer = ast.get_docstring(node)
            if answer and len(answer) >= _SHORTEST_ANSWER and answer not in seen:
                seen.add(answer)
                yield {"prompt": f"Question: {_question(node, name)}\nAnswer:", "completion": f" {answer}"}


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in somebody else's source are not our user's concern
        return ast.parse(path.read_bytes(), filename=str(path))


def _documented(node: _Documented, name: str) -> Iterator[tuple[_Documented, str]]:
    """``node`` and the public classes and functions inside it, depth first, with their dotted names."""
    yield node, name
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield from _documented(child, f"{name}.{child.name}")


def _question(node: _Documented, name: str) -> str:
    if isinstance(node, ast.Module):
        return f"What is the module {name} for?"
    if isinstance(node, ast.ClassDef):
        return f"What is the class {name}?"
    return f"What does {name}({ast.unparse(node.args)}) do?"
