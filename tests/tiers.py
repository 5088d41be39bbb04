"""Tiers of the suite: what ``make test`` runs, and what ``make test-all`` adds. The same for the same commit.

``--tier quick`` (``make test``) runs the tests of `WHOLE`, and of files that take at most `CHEAP` seconds, with all of
their cases, and of every other test one case, but no test that is marked ``slow`` or needs a GPU. Test files that
import a module that differs from the main branch run whole.
``--tier rest`` runs what ``quick`` leaves out. ``--tier all`` runs everything, which is also the default: whoever names
a file, a test, ``-k`` or ``-m`` gets all that were named. ``--shard K/N`` takes the files of one of N shards, of about
equal time by the durations in ``tests/durations.json``.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tests.imports import ROOT, closure_files, modules_of
from tests.processes import run

TIERS = ("quick", "rest", "all")
# Folders and files that run with all of their cases every time. They are quick, and in these files of torch_backend a
# case is a rule of its own about what a batch, a call or a trainer may hold.
RULES = (
    "collate/test_collator.py",
    "collate/test_columns.py",
    "collate/test_shared_prefixes.py",
    "hf/test_changed_after_patch.py",
    "hf/inputs/test_inputs.py",
    "hf/inputs/test_marks.py",
    "hf/inputs/test_unmarked_inputs.py",
    "hf/inputs/test_unpad.py",
    "job/test_memory_fit.py",
    "losses/test_document_losses.py",
    "losses/test_reduction.py",
    "trainers/test_around_training.py",
    "trainers/test_enable_packing.py",
    "trainers/test_replaced_collator.py",
)
WHOLE = ("tests/packing_core/", "tests/house/", *(f"tests/torch_backend/{name}" for name in RULES))
DURATIONS = ROOT / "tests" / "durations.json"
CHEAP = 2.0  # 58 files: 758 more cases, 19 more seconds
UNKNOWN = 10.0  # seconds of a file that has no recorded duration


def quick(
    ids: Sequence[str],
    left_out: Iterable[str],
    whole: Iterable[str] = (),
    durations: Mapping[str, float] = MappingProxyType({}),
) -> set[str]:
    """Returns the tests of ``make test`` among these, by their ids ``file::test[case]``.

    Args:
        ids: all ids that were collected, the cases of a test in order.
        left_out: those that are marked ``slow`` or need a GPU. A case that is skipped would stand for the others.
        whole: files that run whole, slow tests included.
        durations: the seconds of files, of which cheap ones run with all cases.
    """
    left_out, whole = set(left_out), set(whole)
    cases: dict[str, list[str]] = defaultdict(list)
    for name in ids:
        cases[name.partition("[")[0]].append(name)
    taken = set()
    for test, named in cases.items():
        file = test.partition("::")[0]
        if file in whole:
            taken.update(named)
            continue
        left = [name for name in named if name not in left_out]
        if file.startswith(WHOLE) or durations.get(file, UNKNOWN) <= CHEAP:
            taken.update(left)
        elif left:  # another place for every test, so that together they meet every backend and every option
            taken.add(left[zlib.crc32(test.encode()) % len(left)])
    return taken


def shard(files: Iterable[str], durations: Mapping[str, float], number: int, of: int) -> set[str]:
    """Returns the files of shard ``number``, 1 to ``of``: the longest first, each to the shard with the least time."""
    loads, dealt = [0.0] * of, [set[str]() for _ in range(of)]
    for file in sorted(set(files), key=lambda file: (-durations.get(file, UNKNOWN), file)):
        least = loads.index(min(loads))
        loads[least] += durations.get(file, UNKNOWN)
        dealt[least].add(file)
    return dealt[number - 1]


def recorded() -> dict[str, float]:
    """Returns the seconds of each test file, as ``python -m tests.durations`` recorded them."""
    found: dict[str, float] = json.loads(DURATIONS.read_text())
    return found


def changed_files() -> list[str]:
    """Returns the files that differ from the main branch; none where git cannot tell."""
    for main in ("origin/main", "main"):
        base = _git("merge-base", "HEAD", main)
        if base is not None:
            differing = _git("diff", "--name-only", base.strip()) or ""
            untracked = _git("ls-files", "--others", "--exclude-standard") or ""
            return sorted({*differing.splitlines(), *untracked.splitlines()})
    return []


def reached(changed: Iterable[str]) -> set[str]:
    """Returns the test files that are among ``changed`` or import a module of it, by name or by a public name."""
    changed = set(changed)
    modules = modules_of(changed)
    if not modules:
        return set()
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    return {name for name, path in files.items() if name in changed or modules & closure_files(path)}


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = run(["git", "-C", str(ROOT), *arguments])
    return done.stdout if done.returncode == 0 else None  # no such branch, or no checkout
