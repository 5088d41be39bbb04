"""Writes ``tests/durations.json``, the seconds of each test file, by which ``--shard`` divides the suite.

    python -m pytest tests --record report.jsonl && python -m tests.durations report.jsonl

Several records may be given; files that are in none of them keep their seconds.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.tiers import DURATIONS


def seconds_by_file(lines: Iterable[str]) -> dict[str, float]:
    """Adds up the seconds of the tests of each file, fixtures included."""
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        test = json.loads(line)
        found[test["id"].partition("::")[0]] += test["seconds"]
    return dict(found)


def main(records: Sequence[str]) -> None:
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for record in records:
        known |= seconds_by_file(Path(record).read_text().splitlines())
    there = {file: round(seconds, 1) for file, seconds in sorted(known.items()) if Path(file).exists()}
    DURATIONS.write_text(json.dumps(there, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
