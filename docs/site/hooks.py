"""Hooks of MkDocs beside rendering docs/*.md: pages made from elsewhere, links between repository and site.

    repository files (README, CONTRIBUTING, ...)  --generated pages-->  the site's pages
    public names of the packages                  --generated pages-->  API reference, by mkdocstrings
    links to files of the repository              -->  the page made of the file, else the file on the forge

So the pages in docs/ are written for a forge and need no markup of MkDocs, and nothing that the build makes is stored.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import tomllib
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
log = logging.getLogger("mkdocs.hooks.site")  # MkDocs counts warnings below "mkdocs", and --strict fails on them

# File of the repository -> the page that shows it.
SHOWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "benchmarks/RESULTS.md": "results.md",
    "conformance/SPEC.md": "requirements.md",
}
# Page -> title, and the packages whose public names it documents.
REFERENCE = {
    "api/packing.md": ("Packing (`crosspack`, numpy alone)", ("packing_core",)),
    "api/reading.md": ("Reading files (`crosspack`)", ("crosspack.reading",)),
    "api/torch.md": ("PyTorch (`crosspack`, `torch_backend`)", ("torch_backend",)),
    "api/jax.md": ("JAX (`jax_backend`)", ("jax_backend",)),
    "api/protocol.md": ("Backends for the conformance suite (`packing_core.protocol`)", ("packing_core.protocol",)),
}
# Modules whose public functions are imported by their own path.
MODULES = {
    "api/losses.md": (
        "Losses over documents (`torch_backend.losses`)",
        tuple(f"torch_backend.losses.{name}" for name in ("causal_lm", "preference", "policy", "distillation")),
    )
}

_IN_LIST = re.compile(
    r"^  (?=\S)", flags=re.MULTILINE
)  # a forge continues a list's item by two spaces, Markdown by four
_FENCED = re.compile(r"(^ *```.*?^ *```$)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):(?=<code>)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that are made from other files of the repository."""
    pages = {page: (ROOT / source).read_text() for source, page in SHOWN.items()}
    pages["examples.md"] = examples()
    pages |= {page: f"# {title}\n\n" + directives(homes(packages)) for page, (title, packages) in REFERENCE.items()}
    pages |= {page: f"# {title}\n\n" + directives(modules) for page, (title, modules) in MODULES.items()}
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def examples() -> str:
    """A page of all scripts of examples/, each under the first line of its docstring."""
    parts = ["# Examples\n\nEach script runs on a CPU in a minute. The test suite runs all of them.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        purpose = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        body = "\n".join(text.splitlines()[tree.body[0].end_lineno or 0 :]).strip()
        parts.append(f"## {path.name} {{#{path.stem}}}\n\n{purpose}\n\n```python\n{body}\n```\n")
    return "\n".join(parts)


def homes(packages: tuple[str, ...]) -> list[str]:
    """Lists the dotted paths where the public names of packages are defined, in alphabetical order of the names."""
    found = []
    for package in packages:
        module = import_module(package)
        lazy = getattr(module, "_HOME", {})
        for name in sorted(module.__all__, key=str.lower):
            if name in lazy:
                found.append(f"{lazy[name]}.{name}")
            elif hasattr(value := getattr(module, name), "__module__") and value.__module__.startswith(package):
                found.append(f"{value.__module__}.{name}")
    return found


def directives(paths: list[str] | tuple[str, ...]) -> str:
    return "\n\n".join(f"::: {path}" for path in paths) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where they lead on the site."""
    source = {shown: path for path, shown in SHOWN.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(found: re.Match[str]) -> str:
        return found[1] + target(found[2], source, page.file.src_uri) + found[3]

    parts = _FENCED.split(markdown)
    parts[::2] = [_IN_LIST.sub("    ", _LINK.sub(linked, part)) for part in parts[::2]]
    return "".join(parts)


def target(link: str, source: str, page: str) -> str:
    """A link of a file of the repository, as it is on the site.

    Args:
        link: as written.
        source: the file's path in the repository; generated pages count as files of docs/.
        page: the page that shows the file.
    """
    path, hash_sign, anchor = link.partition("#")
    for kind in ("blob", "raw"):
        path = path.removeprefix(f"{REPOSITORY}/{kind}/main/") if path.startswith(REPOSITORY) else path
    if "://" in path or not path:
        return link
    here = "" if link.startswith(REPOSITORY) else os.path.dirname(source)
    path = os.path.normpath(os.path.join(here, path))
    if path.startswith("examples/") and path.endswith(".py"):
        path, hash_sign, anchor = "docs/examples.md", "#", PurePosixPath(path).stem
    on_site = SHOWN.get(path) or (
        path.removeprefix("docs/") if path.startswith("docs/") and not path.endswith(".py") else None
    )
    if on_site:
        return os.path.relpath(on_site, os.path.dirname(page) or ".") + hash_sign + anchor
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which does not exist", source, link)
    return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{hash_sign}{anchor}"


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name functions by roles of Sphinx, which Markdown does not know."""
    return _ROLE.sub("", html)
