"""Shows what a GPU waits for: how long it is busy in a block, its longest gaps, and where the host spends its time."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.gpu_clock import TOY, synchronize

GAP_US = 20.0  # shorter gaps between kernels are those of launches


class DeviceProfile:
    """A block under torch's profiler; printed after it ended."""

    def __enter__(self) -> DeviceProfile:
        kinds = [torch.profiler.ProfilerActivity.CPU if TOY else torch.profiler.ProfilerActivity.CUDA]
        self.device = torch.profiler.profile(activities=kinds)
        self.device.__enter__()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        synchronize()
        self.wall = time.perf_counter() - self.began
        self.device.__exit__(None, None, None)

    def __str__(self) -> str:
        events = self.device.events() or []
        spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type.name == "CUDA")
        busy, end, last, gaps = 0.0, spans[0][0] if spans else 0.0, "the block began", []
        for start, stop, name in spans:
            if start - end > GAP_US:
                gaps.append((start - end, last, name))
            busy += max(0.0, stop - max(start, end))
            if stop > end:
                end, last = stop, name
        lines = [f"{self.wall * 1e3:.0f} ms, GPU busy {busy / 1e3:.0f} ms ({busy / self.wall / 1e4:.0f}%)"]
        lines += [
            f"  {gap / 1e3:.1f} ms between {before[:60]} and {name[:60]}"
            for gap, before, name in sorted(gaps, reverse=True)[:12]
        ]
        total: Counter[str] = Counter()
        for start, stop, name in spans:
            total[name] += stop - start
        lines += [f"  {time_us / 1e3:.1f} ms in {name[:100]}" for name, time_us in total.most_common(16)]
        return "\n".join(lines)


class HostProfile:
    """A block under cProfile, which makes the host slower; printed after it ended."""

    def __enter__(self) -> HostProfile:
        self.host = cProfile.Profile()
        self.host.enable()
        return self

    def __exit__(self, *_: Any) -> None:
        self.host.disable()

    def __str__(self) -> str:
        table = io.StringIO()
        pstats.Stats(self.host, stream=table).strip_dirs().sort_stats("cumtime").print_stats(40)
        return table.getvalue().strip()
