"""Attributes of modules that tests read exist, also in tests that only a GPU runs."""

import ast
from symtable import symtable

from tests.imports import ROOT, files_of


def test_attributes_that_tests_read_of_modules_exist():
    for file in files_of("tests"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        local = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        local |= {x.arg for x in nodes if isinstance(x, ast.arg)}
        defined: dict[str, set[str]] = {}
        for module, name in [(x.module, name) for x in nodes if isinstance(x, ast.ImportFrom) for name in x.names]:
            path = (ROOT / f"{module}.{name.name}".replace(".", "/")).with_suffix(".py")
            if path.exists() and (bound := name.asname or name.name) not in local:
                identifiers = symtable(path.read_text(), str(path), "exec").get_identifiers()
                defined.setdefault(bound, {"__name__", "__file__"}).update(identifiers)
        reads = [x for x in nodes if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)]
        wrong = [ast.unparse(x) for x in reads if x.value.id in defined and x.attr not in defined[x.value.id]]
        assert not wrong, f"{file}: {wrong}"
