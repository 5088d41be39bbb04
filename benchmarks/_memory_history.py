"""Tells what is alive when a GPU holds most, by replaying the allocator's history.

begin_history() -> what allocates -> end_history() -> a table, by the line of code that allocated; nothing without a GPU
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks._report import table

OURS = ("/torch_backend/", "/packing_core/", "inductor", "/transformers/", "/torch/optim/", "/torch/nn/")
GIB = 2**30
LEAST = 2**25  # bytes of a line of the table


def begin_history() -> None:
    if not torch.cuda.is_available():
        return
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")


def end_history(tokens: int | None = None) -> str:
    """Returns the table of what was allocated since the beginning and alive at the peak; bytes a token too, if given.

    The innermost line of code that says what a block is for stands for it.
    """
    if not torch.cuda.is_available():
        return "no GPU"
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    peak, alive = alive_at_peak(history)
    columns = [f"alive at the peak, {peak / GIB:.2f} GiB beyond what was there before", "GiB", "blocks"]
    lines = [
        [where, f"{size / GIB:.2f}", str(count), *([] if tokens is None else [f"{size / tokens:,.0f}"])]
        for where, (size, count) in alive.items()
        if size > LEAST
    ]
    return table([*columns, *([] if tokens is None else ["bytes a token"])], lines)


def alive_at_peak(history: Iterable[Mapping[str, Any]]) -> tuple[int, dict[str, tuple[int, int]]]:
    """The most that was allocated, and by which line: bytes and blocks that were alive then, the largest first."""
    events = [event for event in history if event["action"] in ("alloc", "free_requested")]
    now = most = at = 0
    sizes: dict[int, int] = {}
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            now += event["size"]
            if now > most:
                most, at = now, number
        else:
            now -= sizes.pop(event["addr"], 0)
    alive: dict[int, Mapping[str, Any]] = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        else:
            alive.pop(event["addr"], None)
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in alive.values():
        where = line_of(event.get("frames", ()))
        sums[where] += event["size"]
        counts[where] += 1
    return most, {where: (size, counts[where]) for where, size in sums.most_common()}


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of code that says what a block is for; of compiled code its text, which has the shape."""
    frames = list(frames)
    found = next((frame for frame in frames if any(part in frame["filename"] for part in OURS)), None)
    if found is None:
        return "no Python line: the backward of torch" if not frames else f"{frames[0]['filename']}:{frames[0]['line']}"
    if "inductor" in found["filename"]:
        return linecache.getline(found["filename"], found["line"]).strip().replace("|", "/")[:100]
    return f"{'/'.join(Path(found['filename']).parts[-2:])}:{found['line']} {found['name']}"
