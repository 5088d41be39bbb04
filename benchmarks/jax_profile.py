"""Lists what a compiled JAX step spends the device's time on, from a trace of ``jax.profiler``.

Data flows trace events (a kernel, the operation of the compiled program that launched it, when, how long) + the
program's text (which named scopes each operation came from, fused ones included) -> microseconds of each kind of work,
and of none.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

# kind -> what names of its kernels, operations or their origins look like; of the first kind that any of them matches
KINDS = {
    "communication": r"^(all-reduce|all-gather|reduce-scatter|collective|ncclDev)",
    "attention, forward": r"segment_attention_forward",
    "attention, dq": r"segment_attention_dq",
    "attention, dkv": r"segment_attention_dkv",
    "attention, around the kernels": r"_attend",
    "rope (operations that hold any of it)": r"\brope\b",
    "loss and output head": r"cross_entropy",
    "optimizer": r"\boptimizer\b|apply_updates",
    "embedding": r"\b(gather|scatter-add|take)\b",
    "stacking and slicing of layers": r"dynamic_(update_)?slice",
    "casts": r"^(wrapped_|loop_)?convert",
    "copies, transposes, fills": r"^(wrapped_|loop_|input_)?(copy|transpose|bitcast|broadcast|memset|Memset|MemcpyD2D)",
}
# Kernels of matrix products, whose operations may be named after a transpose that was folded into them.
PRODUCT = re.compile(r"nvjet|gemm|cutlass|xmma|cublas|^dot")
HEAD = "loss and output head"
OTHER = "norms, activations, residuals"
IDLE = "nothing"

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)


class Event(NamedTuple):
    """A kernel, the operation that launched it ("" if the trace does not tell), microseconds of begin and end."""

    kernel: str
    operation: str
    begin: float
    end: float


class Operation(NamedTuple):
    """One operation of the program: microseconds, how often it ran, its kind, one of its origins, and its output."""

    microseconds: float
    times: int
    name: str
    kind: str
    origin: str
    result: str


def profile_of(folder: Path, program: str, longest: int = 40) -> tuple[Counter[str], list[Operation]]:
    """Microseconds of each kind of work and of none, and the operations that took longest.

    Raises:
        FileNotFoundError: the folder holds no trace.
    """
    events = read_events(folder)
    origins, results = origins_of(program)
    kinds: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    times: Counter[str] = Counter()
    kind_of: dict[str, str] = {}
    for event in events:
        name = event.operation or event.kernel
        kind_of[name] = _kind(event, origins.get(name, set()))  # the last kernel's: a product may begin by a fill
        kinds[kind_of[name]] += event.end - event.begin
        spent[name] += event.end - event.begin
        times[name] += 1
    kinds[IDLE] = idle(events)
    operations = [
        Operation(
            time,
            times[name],
            name,
            kind_of[name],
            max(origins.get(name, ()), key=len, default=""),
            results.get(name, ""),
        )
        for name, time in spent.most_common(longest)
    ]
    return kinds, operations


def _kind(event: Event, origins: set[str]) -> str:
    names = {event.operation, event.kernel} | origins
    kind = next((kind for kind, mark in KINDS.items() if any(re.search(mark, name) for name in names)), OTHER)
    if any(PRODUCT.search(name) for name in (event.operation, event.kernel)):
        return f"{HEAD}, products" if kind == HEAD else "products of the layers"
    return kind


def idle(events: list[Event]) -> float:
    """Microseconds between the first event's begin and the last one's end in which none ran."""
    gaps, busy_until = 0.0, events[0].begin
    for event in sorted(events, key=lambda event: event.begin):
        gaps += max(event.begin - busy_until, 0.0)
        busy_until = max(busy_until, event.end)
    return gaps


def origins_of(program: str) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Operation of the program -> the names of all that was fused into it, as they were traced; and its result."""
    bodies: dict[str, set[str]] = {}
    lines: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", program):
        header = _COMPUTATION.match(block)
        found = {match[1]: match[0] for match in _INSTRUCTION.finditer(block)}
        lines |= found
        if header:
            bodies[header[1]] = set().union(*map(_names, found.values())) if found else set()
    origins, results = {}, {}
    for name, text in lines.items():
        called = re.search(r"calls=%?([\w.\-]+)", text)
        origins[name] = _names(text) | (bodies.get(called[1], set()) if called else set())
        results[name] = text.split(" = ", 1)[1].split(" ", 1)[0][:60]
    return origins, results


def _names(text: str) -> set[str]:
    return set(re.findall(r'op_name="([^"]*)"', text))


def read_events(folder: Path) -> list[Event]:
    """Reads what ran on the first device that ran anything, but for loops, whose bodies are listed by themselves."""
    files = sorted(folder.rglob("*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.trace.json.gz")
    traced: list[dict[str, Any]] = []
    for file in files:
        traced += json.loads(gzip.decompress(file.read_bytes())).get("traceEvents", [])
    processes = {event["pid"]: event["args"]["name"] for event in traced if event.get("name") == "process_name"}
    threads = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in traced
        if event.get("name") == "thread_name"
    }
    devices = sorted(pid for pid, name in processes.items() if "/device:GPU" in name)
    # a device's other threads sum up what its streams ran
    streams = {key for key, name in threads.items() if key[0] in devices[:1] and "Stream" in name}
    events = [
        Event(event["name"], event.get("args", {}).get("hlo_op", ""), event["ts"], event["ts"] + event["dur"])
        for event in traced
        if event.get("ph") == "X"
        and ((event["pid"], event.get("tid")) in streams if devices else "hlo_op" in event.get("args", {}))
    ]
    return [event for event in events if not event.operation.startswith(("while", "call", "conditional"))]
