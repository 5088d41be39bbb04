"""Everything that needs a GPU, in one command: the tests marked ``gpu``, then the gate of every backend.

    python -m tests.gpu [--two] [--only tests|gate] [--shard K/N] [--minutes 13] [--output gpu-report]

Results are written as they come (``tests.jsonl`` and ``gate-*.jsonl`` in the output folder), each test has a limit,
and the whole run ends after so many minutes, so a run that is stopped has named what failed. ``report.md`` has the
versions, the failures, the slowest tests, and the table of backends. ``--two`` runs the tests
that need two GPUs instead (NCCL). The package need not be installed: its entry points are read from pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Judged at the same time, each family by its share of the processes.
SHARES = {"torch": 5 / 8, "jax": 3 / 8}  # flex compiles for minutes
BACKENDS = {"torch": ("sdpa", "triton", "varlen", "flex"), "jax": ("cudnn", "pallas", "chunked", "xla")}
PACKAGES = ("torch", "triton", "transformers", "jax", "flax", "numpy", "pytest")
TEST_LIMIT = 240  # seconds of one test, in which its kernels compile for the first time
GATE_SHARE = 0.6  # of the whole time
STOPPED = 124
_MARKS = re.compile(r"mark\.gpu|mark\.two_gpus|indirect=")  # the cases of a fixture are marked where it is defined


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--two", action="store_true", help="the tests that need two GPUs, without the gate")
    options.add_argument("--only", choices=("tests", "gate"), help="without the other part")
    options.add_argument("--shard", metavar="K/N")
    options.add_argument("--minutes", type=float, default=13.0)
    options.add_argument("--processes", type=int, default=max(2, min(16, os.cpu_count() or 2)))
    options.add_argument("--output", type=Path, default=Path("gpu-report"))
    given = options.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_entry_points(Path(folder))), str(ROOT), *_paths()]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # Compiling takes most of the time: no process starts compilers of its own, and XLA tries no variants.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
        }
        ended = []
        if given.only != "gate":
            tests_end = end if given.two or given.only else end - 60 * given.minutes * GATE_SHARE
            ended += _run([_tests(given)], given.output, environment, tests_end)
        if given.only != "tests" and not given.two:
            ended += _run([_gate(family, given) for family in _mine(given.shard)], given.output, environment, end)
    (given.output / "report.md").write_text(report(given.output, ended))
    print((given.output / "report.md").read_text())
    return int(any(status for _, status in ended))


def files() -> list[Path]:
    """Returns the test files that mark tests for a GPU; a machine with one need not be able to import the others."""
    return [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if _MARKS.search(path.read_text())]


def _tests(given: argparse.Namespace) -> tuple[str, list[str]]:
    command = [
        *(str(path.relative_to(ROOT)) for path in files()),
        "-q",
        "-m",
        "two_gpus" if given.two else "gpu and not two_gpus",
    ]
    command += ["--record", str(given.output / "tests.jsonl"), "--limit", str(TEST_LIMIT)]
    command += [] if given.two else ["--numprocesses", str(given.processes), "--dist", "worksteal"]
    return "tests", [*command, "--shard", given.shard] if given.shard else command


def _gate(family: str, given: argparse.Namespace) -> tuple[str, list[str]]:
    chosen = [part for name in BACKENDS[family] for part in ("--backend", f"{family}:{name}")]
    command = ["conformance", "-v", *chosen, "--report", str(given.output / f"gate-{family}.json")]
    command += ["-p", "tests.recording", "--record", str(given.output / f"gate-{family}.jsonl")]
    processes = max(1, round(given.processes * SHARES[family]))
    # In the order of the files: by number of tests, the longest ones, which are alone in their groups, would come last.
    return f"gate-{family}", [
        *command,
        "--numprocesses",
        str(processes),
        "--dist",
        "loadgroup",
        "--no-loadscope-reorder",
    ]


def _run(
    commands: list[tuple[str, list[str]]], output: Path, environment: dict[str, str], end: float
) -> list[tuple[str, int]]:
    """Runs pytest with several sets of arguments at once; returns each name and exit status, 124 if it was stopped."""
    running = []
    for name, arguments in commands:
        log = (output / f"{name}.log").open("w")
        command = [sys.executable, "-m", "pytest", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        running.append((name, process))
    ended = []
    for name, process in running:
        try:
            ended.append((name, process.wait(max(0.0, end - time.monotonic()))))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended.append((name, STOPPED))
    return ended


def report(output: Path, ended: list[tuple[str, int]]) -> str:
    """Returns the report of what lies in ``output`` as Markdown."""
    lines = ["# GPU report", "", _machine(), "", ", ".join(f"{name} {_version(name)}" for name in PACKAGES), ""]
    lines += [
        f"- {name}: {'stopped by the time limit' if status == STOPPED else f'status {status}'}"
        for name, status in ended
    ]
    counts = Counter(result["outcome"] for result in _results(output / "tests.jsonl"))
    lines += ["", "Tests: " + (", ".join(f"{n} {name}" for name, n in counts.items()) or "none")]
    results = [result for record in sorted(output.glob("*.jsonl")) for result in _results(record)]
    for result in results:
        if result["outcome"] == "failed":
            lines += ["", f"FAILED {result['id']}", "```text", result["error"][-1500:], "```"]
    slowest = sorted(results, key=lambda result: -result["seconds"])[:15]
    lines += ["", "| slowest | s |", "|---|---:|", *(f"| `{r['id']}` | {r['seconds']:.1f} |" for r in slowest)]
    lines += ["", "| skipped, reason | tests |", "|---|---:|"]
    # Not those of the gate, whose ids have no folder: its table counts them.
    reasons = Counter(r["reason"] for r in results if r["outcome"] == "skipped" and "/" in r["id"].partition("::")[0])
    lines += [f"| {reason} | {n} |" for reason, n in reasons.most_common()]
    return "\n".join([*lines, "", *_gate_table(output)]) + "\n"


def _results(record: Path) -> list[dict[str, Any]]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [result for result in map(json.loads, lines) if result["outcome"] != "fixture"]


def _gate_table(output: Path) -> list[str]:
    rows = ["| backend | passed | failed | others | seconds |", "|---|---:|---:|---:|---:|"]
    by_backend: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(output.glob("gate-*.jsonl")):
        for result in _results(record):
            found = re.search(r"\[([^-\]]+)", result["id"])
            by_backend.setdefault(found[1] if found else "none", []).append(result)
    for name, results in sorted(by_backend.items()):
        counts = Counter(result["outcome"] for result in results)
        others = counts.total() - counts["passed"] - counts["failed"]
        seconds = sum(result["seconds"] for result in results)
        rows.append(f"| {name} | {counts['passed']} | {counts['failed']} | {others} | {seconds:,.0f} |")
    return rows


def _mine(shard: str | None) -> list[str]:
    number, of = (int(part) for part in shard.split("/")) if shard else (1, 1)
    return list(BACKENDS)[number - 1 :: of]


def _entry_points(folder: Path) -> Path:
    """Makes the entry points of pyproject.toml known in a folder for ``PYTHONPATH``, as an installation would."""
    groups: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "crosspack-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: crosspack\nVersion: 0\n")
    text = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(text) + "\n")
    return folder


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _machine() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
