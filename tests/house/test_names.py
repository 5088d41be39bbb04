"""A public name and a sub-package never share a name: ``import package.name as x`` would bind the one or the other.

And messages say the names that users import, those of ``crosspack``, docstrings begin with the action,
a class name stands for one concept, and a file name is not reused at will.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import crosspack

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ".".join(folder.relative_to(ROOT).parts)
    for top in ("torch_backend", "jax_backend", "conformance", "crosspack", "packing_core")
    for folder in sorted(path.parent for path in (ROOT / top).rglob("__init__.py"))
]


def hidden(package: ModuleType, folder: Path) -> set[str]:
    """Sub-packages of the folder whose name is also that of a public name, or of anything else that is no module."""
    subpackages = {path.parent.name for path in folder.glob("*/__init__.py")}
    others = {name for name, value in vars(package).items() if not isinstance(value, ModuleType)}
    return subpackages & {*getattr(package, "__all__", ()), *others}


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_hides_a_sub_package(name: str) -> None:
    assert not hidden(import_module(name), ROOT / Path(*name.split(".")))


def test_a_name_that_hides_a_sub_package_is_found(tmp_path: Path) -> None:
    for name in ("attention", "rope"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    package = ModuleType("package")
    package.rope = ModuleType("package.rope")  # what importing the sub-package leaves behind
    assert hidden(package, tmp_path) == set()
    package.__all__ = ["rope"]  # a lazy name
    package.attention = lambda: None
    assert hidden(package, tmp_path) == {"attention", "rope"}


def messages(code: str) -> list[str]:
    """Texts in a module that are no docstrings: what it raises, warns of and prints."""
    nodes = list(ast.walk(ast.parse(code)))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in statements]
    return [text.value for text in texts if isinstance(text.value, str) and " " in text.value.strip()]


def hard_to_import(text: str) -> list[str]:
    """Names in a message that ``crosspack`` has too; whoever trains with JAX imports ``jax_backend`` in any case."""
    named = re.findall(r"\b(packing_core|torch_backend)\.(\w+)", text)
    return [f"{package}.{name}" for package, name in named if name in dir(crosspack)]


def test_messages_name_what_users_import() -> None:
    for package in {name.partition(".")[0] for name in PACKAGES}:
        for path in (ROOT / package).rglob("*.py"):
            found = [name for text in messages(path.read_text()) for name in hard_to_import(text)]
            assert not found, f"{path.relative_to(ROOT)}: {found}"
    assert messages('"""torch_backend.patch it"""\nraise E(f"{x}: call torch_backend.patch(model)")') == [
        ": call torch_backend.patch(model)"
    ]
    assert hard_to_import("call torch_backend.patch(model)") == ["torch_backend.patch"]
    assert hard_to_import("jax_backend.to_batch makes it, as crosspack.pack does, by packing_core.planning") == []


CODE = (
    "packing_core",
    "torch_backend",
    "jax_backend",
    "crosspack",
    "conformance",
    "benchmarks",
    "tools",
    "examples",
    "tests",
    "docs",
)
QUESTIONS = (
    "All that",
    "How",
    "Of",
    "Those",
    "What",
    "When",
    "Where",
    "Whether",
    "Which",
    "Who",
    "Whom",
    "Whose",
    "Why",
)


def questions(code: str) -> list[str]:
    """Names of what has a docstring that begins with a question word, not with an action: "Returns", "Packs"."""
    begins = re.compile(rf"({'|'.join(QUESTIONS)})(ever)?\b(?!-)")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, documented)]
    return [getattr(node, "name", "the module") for node in nodes if begins.match(ast.get_docstring(node) or "")]


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_begin_with_the_action(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in (ROOT / folder).rglob("*.py")
        if (names := questions(path.read_text()))
    }
    assert not found


def test_a_docstring_that_begins_with_a_question_word_is_found() -> None:
    code = '''"""What is here."""\nclass A:\n    """Of one rank."""\n    def b(): """Whatever it gets."""\n'''
    assert questions(code) == ["the module", "A", "b"]
    assert questions('"""Returns what is here. Whether it is used is another matter."""') == []
    assert questions('"""Whole rows, at one-of-a-kind offsets."""') == []


ONE_CONCEPT = {  # classes of one name for one concept, with the package of each
    "AuditReport": ["jax_backend", "torch_backend"],
    "ClipMethods": ["conformance", "torch_backend"],
    "Decoder": ["jax_backend", "packing_core"],
    "DecoderConfig": ["jax_backend", "packing_core"],
    "DocumentMethods": ["conformance", "jax_backend", "torch_backend"],
    "Explanation": ["jax_backend", "torch_backend"],
    "ExpertMethods": ["conformance", "torch_backend"],
    "ScanMethods": ["conformance", "jax_backend", "torch_backend"],
    "SelectionMethods": ["conformance", "torch_backend"],
    "TokenLogprobs": ["jax_backend", "torch_backend"],
    "TrainStep": ["jax_backend", "torch_backend"],
}


def classes(code: str) -> list[str]:
    return [node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]


def test_a_class_name_stands_for_one_concept() -> None:
    places: dict[str, list[str]] = {}
    for package in sorted({name.partition(".")[0] for name in PACKAGES}):
        for path in (ROOT / package).rglob("*.py"):
            for name in classes(path.read_text()):
                places.setdefault(name, []).append(package)
    assert {name: found for name, found in places.items() if len(found) > 1} == ONE_CONCEPT
    assert classes("class A:\n    class B: ...\n\ndef C(): ...") == ["A"]


USED_OFTEN = 4  # files that one name may stand for
BY_CONVENTION = {"__init__.py", "conftest.py"}  # names that Python and pytest look for


def used_too_often(files: Iterable[Path]) -> list[str]:
    counts = Counter(file.name for file in files)
    return sorted(name for name, count in counts.items() if count > USED_OFTEN and name not in BY_CONVENTION)


def test_a_file_name_stands_for_few_files() -> None:
    assert used_too_often(path for folder in CODE for path in (ROOT / folder).rglob("*.py")) == []


def test_a_file_name_that_stands_for_many_files_is_found() -> None:
    names = {"kernels.py": 5, "model.py": 4, "__init__.py": 9}
    assert used_too_often(Path(str(i), name) for name, n in names.items() for i in range(n)) == ["kernels.py"]
