"""Which parts of a compiled JAX step take the device's time, from a trace of ``jax.profiler``.

Data flows trace events (an operation of the compiled program and its microseconds) + the program's text (which named
scopes each operation came from, fused ones included) -> microseconds of each part.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

# part -> what the names of its operations contain; an operation belongs to the first part that any of its origins names
PARTS = {
    "rope (operations that hold any of it)": "rope",
    "attention kernels": "_attend",
    "loss and output head": "cross_entropy",
    "optimizer": "optimizer",
    "matrix products": "dot_general",
}
OTHER = "norms, activations, copies"

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)


def parts_of_trace(folder: Path, program: str, longest: int = 25) -> tuple[Counter[str], list[tuple[float, str, str]]]:
    """Microseconds of each part, and the operations that took longest with one of their origins.

    Raises:
        FileNotFoundError: the folder holds no trace.
    """
    origins = origins_of(program)
    parts: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for name, microseconds in _events(folder):
        found = origins.get(name, ())
        part = next((part for part, mark in PARTS.items() if any(mark in origin for origin in found)), OTHER)
        parts[part] += microseconds
        operations[name] += microseconds
    top = operations.most_common(longest)
    return parts, [(microseconds, name, max(origins.get(name, ()), key=len, default="")) for name, microseconds in top]


def origins_of(program: str) -> dict[str, set[str]]:
    """Operation of the program -> the names of all that was fused into it, as they were traced."""
    bodies: dict[str, set[str]] = {}
    lines: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", program):
        header = _COMPUTATION.match(block)
        found = {match[1]: match[0] for match in _INSTRUCTION.finditer(block)}
        lines |= found
        if header:
            bodies[header[1]] = set().union(*map(_names, found.values())) if found else set()
    origins = {}
    for name, text in lines.items():
        called = re.search(r"calls=%?([\w.\-]+)", text)
        origins[name] = _names(text) | (bodies.get(called[1], set()) if called else set())
    return origins


def _names(text: str) -> set[str]:
    return set(re.findall(r'op_name="([^"]*)"', text))


def _events(folder: Path) -> list[tuple[str, float]]:
    """Operation and microseconds of each that ran, but for loops, whose bodies are listed by themselves."""
    files = sorted(folder.rglob("*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.trace.json.gz")
    events: list[dict[str, Any]] = []
    for file in files:
        events += json.loads(gzip.decompress(file.read_bytes())).get("traceEvents", [])
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    devices = {pid for pid, name in processes.items() if "/device:GPU" in name} or set(processes)  # not the host's half
    named = [
        (event["args"]["hlo_op"], float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event["pid"] in devices and "hlo_op" in event.get("args", {})
    ]
    return [(name, dur) for name, dur in named if not name.startswith(("while", "call", "conditional"))]
