"""Checks before a release: ``python .ci/release.py v0.3.0 dist/*``. Standard library only.

The tag, pyproject.toml, CITATION.cff and the changelog must name one version, and the wheel and the sdist must hold the
packages, their data, the licence and nothing else.
"""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("crosspack", "packing_core", "torch_backend", "jax_backend", "conformance")
DATA = {".py", ".json", ".yaml", ".md", ".ini", ".typed"}
BESIDE = {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "setup.cfg"}  # of an sdist


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def version_faults(tag: str) -> list[str]:
    """Lists what keeps a tag from being released."""
    stated = version()
    faults = [] if tag == f"v{stated}" else [f"the tag is {tag}, pyproject.toml has {stated}"]
    citation = (ROOT / "CITATION.cff").read_text()
    if f"\nversion: {stated}\n" not in citation:
        faults.append(f"CITATION.cff has another version than {stated}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    dated = re.search(rf"^## \[{re.escape(stated)}\] - (\d{{4}}-\d\d-\d\d)$", changes, re.MULTILINE)
    if dated is None:
        faults.append(f"CHANGELOG.md has no section [{stated}] with a date")
    elif f"\ndate-released: {dated[1]}\n" not in citation:
        faults.append(f"CITATION.cff has another date than {dated[1]}")
    return faults


def names_in(archive: Path) -> list[str]:
    """Files of a wheel or an sdist; those of an sdist without the folder that holds them all."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [name for name in wheel.namelist() if not name.endswith("/")]
    with tarfile.open(archive) as sdist:
        return [member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()]


def content_faults(names: Iterable[str]) -> list[str]:
    """Lists files that a wheel or an sdist lacks, and files that do not belong there."""
    names = set(names)
    faults = []
    for name in sorted(names):
        top, _, _ = name.partition("/")
        metadata = top.endswith((".dist-info", ".egg-info")) or name in BESIDE
        if not metadata and (top not in PACKAGES or Path(name).suffix not in DATA or _is_cache(name)):
            faults.append(f"{name} does not belong here")
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*")}
    needed = {name for name in sources if Path(name).suffix in DATA and not _is_cache(name)}
    faults += [f"{name} is missing" for name in sorted(needed - names)]
    if not any(name.rpartition("/")[2] == "LICENSE" for name in names):
        faults.append("the licence is missing")
    return faults


def _is_cache(name: str) -> bool:
    """Returns whether Python, pytest or another tool left it in the tree."""
    return any(part == "__pycache__" or part.startswith(".") for part in Path(name).parts)


def main(tag: str, *archives: str) -> int:
    faults = version_faults(tag) + [
        f"{archive}: {fault}" for archive in archives for fault in content_faults(names_in(Path(archive)))
    ]
    print("\n".join(faults) or f"{tag}: {len(archives)} archives are complete")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
