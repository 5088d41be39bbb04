"""The outcome of a run: one record per test in, a JSON report and a table of backends by requirement groups out.

A requirement of a backend is ``fail`` if any of its tests failed, else ``pass`` if any passed, else ``unsupported`` if
the backend declares it away (and refused it, as it must), else ``not run`` with the reason.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from conformance.registry import Roster
from conformance.spec import Requirement

PASS, FAIL, UNSUPPORTED, NOT_RUN = "pass", "fail", "unsupported", "not run"
FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One test of one backend: the requirement's id, the outcome, its reason, and the largest error over budget."""

    backend: str
    requirement: str
    outcome: str
    reason: str = ""
    worst: float = 0.0


FIELDS = tuple(field.name for field in fields(Record))


@dataclass
class Verdict:
    """One requirement of one backend."""

    status: str
    passed: int = 0
    failed: int = 0
    unsupported: int = 0
    worst: float | None = None
    reasons: list[str] = field(default_factory=list)


def verdicts(records: Iterable[Record], requirements: Iterable[str], absent: str) -> dict[str, Verdict]:
    """Every requirement's verdict from one backend's records; ``absent`` says why one without records was not run."""
    by_id: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_id[record.requirement].append(record)
    return {name: _verdict(by_id[name], absent) for name in requirements}


def _verdict(records: list[Record], absent: str) -> Verdict:
    counts = {status: sum(r.outcome == status for r in records) for status in (PASS, FAIL, UNSUPPORTED)}
    status = next((status for status in (FAIL, PASS, UNSUPPORTED) if counts[status]), NOT_RUN)
    reasons = sorted({r.reason for r in records if r.outcome == status and r.reason}) if records else [absent]
    measured = [r.worst for r in records if r.outcome in (PASS, FAIL)]
    return Verdict(status, counts[PASS], counts[FAIL], counts[UNSUPPORTED], max(measured, default=None), reasons)


def undeclared(records: Iterable[Record]) -> dict[str, list[str]]:
    """Maps what a backend does not have or declare -> the requirements in which it was wanted; most wanted first.

    Keys are methods ("scan()"), options ("window"), "dtype float16" and "head_dim 512".
    """
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.outcome == UNSUPPORTED:
            for what in _lacking(record.reason.removeprefix("unsupported: ")):
                found[what].add(record.requirement)
    return {what: sorted(ids) for what, ids in sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0]))}


def _lacking(reason: str) -> list[str]:
    if reason.startswith("no "):
        return [reason.removeprefix("no ") + "()"]
    return reason.partition(" is not declared")[0].removesuffix(" not declared").split(", ")


def report(roster: Roster, records: Iterable[Record], spec: Mapping[str, Requirement], absent: str) -> dict[str, Any]:
    """The whole report as plain values."""
    by_backend: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_backend[record.backend].append(record)
    return {
        "format": FORMAT,
        "requirements": {name: asdict(requirement) for name, requirement in spec.items()},
        "backends": {
            name: {
                "description": backend.description,
                "capabilities": {
                    "dtypes": list(backend.capabilities.dtypes),
                    "options": sorted(backend.capabilities.options),
                    "interpreted": backend.capabilities.interpreted,
                    "atomic_backward": backend.capabilities.atomic_backward,
                    "atomic_embedding": backend.capabilities.atomic_embedding,
                    "own_model": backend.capabilities.own_model,
                },
                "undeclared": undeclared(by_backend[name]),
                "requirements": {i: asdict(v) for i, v in verdicts(by_backend[name], spec, absent).items()},
            }
            for name, backend in roster.backends.items()
        },
        "not_run": dict(roster.not_run),
    }


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write the report as strict JSON, in a folder that is made if need be; an error that is not finite becomes the
    string "inf"."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strict(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [strict(entry) for entry in value]
        return "inf" if isinstance(value, float) and not math.isfinite(value) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(strict(found), indent=1, allow_nan=False) + "\n")


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines of the table: a row per backend, a column per group of requirements.

    A cell counts requirements: passed, then ``!`` failed, ``u`` unsupported, ``-`` not run.
    """
    groups = list(dict.fromkeys(name.partition("-")[0] for name in found["requirements"]))
    names = list(found["backends"])
    width = max([len(name) for name in names], default=0)
    cells = {name: [_cell(found["backends"][name]["requirements"], group) for group in groups] for name in names}
    columns = [max(len(group), *(len(cells[name][i]) for name in names)) for i, group in enumerate(groups)]
    lines = ["  ".join([" " * width, *(group.rjust(w) for group, w in zip(groups, columns))])]
    lines += ["  ".join([name.ljust(width), *(c.rjust(w) for c, w in zip(cells[name], columns))]) for name in names]
    lines += [f"{name}: NOT RUN: {reason}" for name, reason in found["not_run"].items()]
    for name in names:
        lines += _not_declared(name, found["backends"][name]["undeclared"], found["requirements"])
    return lines


def _not_declared(name: str, lacking: Mapping[str, list[str]], requirements: Mapping[str, Any]) -> list[str]:
    """Lists by method what a backend left out, and how many requirements each option leaves out."""
    by_method: dict[str, Counter[str]] = defaultdict(Counter)
    for what, ids in lacking.items():
        for method in (requirements[requirement]["method"] for requirement in ids):
            by_method[method]["not implemented" if what == f"{method}()" else what] += 1
    if not by_method:
        return []
    listed = {method: ", ".join(f"{what} {n}" for what, n in counts.items()) for method, counts in by_method.items()}
    width = max(map(len, listed))
    lines = [f"  {method.ljust(width)}  {listed[method]}" for method in sorted(listed)]
    return [f"{name}: not declared, by method, with the number of requirements left out:", *lines]


def _cell(requirements: Mapping[str, Any], group: str) -> str:
    statuses = [entry["status"] for name, entry in requirements.items() if name.partition("-")[0] == group]
    marks = ((PASS, ""), (FAIL, "!"), (UNSUPPORTED, "u"), (NOT_RUN, "-"))
    counts = [f"{statuses.count(status)}{mark}" for status, mark in marks if status in statuses]
    return " ".join(counts)
