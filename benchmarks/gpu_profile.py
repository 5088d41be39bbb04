"""Profiles the GPU in some steps of training: kernels by kind, and how long it does nothing.

seen = Profile()
seen.start(); ...; seen.stop()     # around steps that are warm
print(seen.report(steps=3))
print(beside([...]))               # what seen.kinds(steps=3) of each rank returned
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks._report import table
from benchmarks.gpu_clock import TOY, synchronize

# The first that matches: names as the profiler prints them.
KINDS = {
    "loss: powers, factors": r"^(powers|finish|target_logits|scale_rows|softmax_loss)",
    "loss: product into the float32 gradient": r"nvjet_sm90_tss|_sss_",
    "NCCL": r"nccl",
    "other matrix products": r"nvjet|gemm|cutlass|splitK|cublas",
    "optimizer, clipping": r"multi_tensor|[Aa]dam|lpnorm|LpNorm",
    "attention, RoPE": r"^(forward|backward|prepare|rotate)\w*$",
    "scans": r"^(carry|chunk|states?|output|ends|enter|gates|solve|decay|prepare_wy|recompute|fused_|merge)",
    "compiled pointwise and norms": r"^triton_",
    "copies and fills": r"Memcpy|Memset|[Ff]ill|copy_kernel|CatArray",
    "other pointwise": r"elementwise",
    "rest": r"",
}
# Spans of several kernels.
SPANS = re.compile(r"^(DistributedDataParallel|FSDP|Optimizer|Torch-Compiled|ProfilerStep|##|nccl:)").search
SHOWN = 24  # kernels in the table


class Profile:
    """The kernels between ``start`` and ``stop``."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not TOY:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.catching = warnings.catch_warnings(record=True)
        self.waits: list[warnings.WarningMessage] = []

    def start(self) -> None:
        synchronize()
        self.waits = self.catching.__enter__() or []
        warnings.simplefilter("always")
        if not TOY:
            torch.cuda.set_sync_debug_mode("warn")
        self.profiler.start()

    def stop(self) -> None:
        if not TOY:
            torch.cuda.set_sync_debug_mode("default")
        self.catching.__exit__(None, None, None)
        synchronize()
        self.profiler.stop()

    def kinds(self, steps: int) -> dict[str, float]:
        """Milliseconds a step by kind of kernel, and in which no kernel runs, or none but NCCL's."""
        events = self._kernels()
        spans = _spans(events)
        kinds: Counter[str] = Counter()
        for event in events:
            kinds[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3
        busy = covered(spans)
        others = [span for span, event in zip(spans, events, strict=True) if kind_of(event.name) != "NCCL"]
        kinds["nothing runs"] = (_length(spans) - busy) / 1e3
        kinds["NCCL, nothing beside it"] = (busy - covered(others)) / 1e3
        return {kind: ms / steps for kind, ms in kinds.most_common()}

    def report(self, steps: int) -> str:
        """Tables, in milliseconds a step: by kind, longest kernels, and where the host spends time and waits."""
        events = self._kernels()
        whole = _length(_spans(events)) / 1e3 / steps
        times: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in events:
            times[event.name] += event.time_range.elapsed_us() / 1e3
            calls[event.name] += 1
        by_kind = [[kind, f"{ms:.2f}", f"{ms / whole:.1%}"] for kind, ms in self.kinds(steps).items()]
        longest = [
            [name[:80], f"{calls[name] / steps:.0f}", f"{ms / steps:.2f}"] for name, ms in times.most_common(SHOWN)
        ]
        host = sorted(self.profiler.key_averages(), key=lambda x: x.self_cpu_time_total, reverse=True)
        calls_of_host = [
            [x.key[:80], f"{x.count / steps:.0f}", f"{x.self_cpu_time_total / 1e3 / steps:.2f}"] for x in host[:SHOWN]
        ]
        places = Counter(f"{w.filename}:{w.lineno}" for w in self.waits if "called a synchronizing" in str(w.message))
        waits = [[place[-80:], f"{count / steps:.1f}"] for place, count in places.most_common(SHOWN)]
        return "\n\n".join(
            (
                table([f"of {whole:.1f} ms a step", "ms", "share"], by_kind),
                table([f"kernel, of {len(events) / steps:.0f}", "calls a step", "ms"], longest),
                table(["on the host", "calls a step", "ms of its own"], calls_of_host),
                table(["the host waits for the GPU at", "times a step"], waits),
            )
        )

    def _kernels(self) -> list[Any]:
        wanted = torch.autograd.DeviceType.CPU if TOY else torch.autograd.DeviceType.CUDA
        return [event for event in self.profiler.events() if event.device_type == wanted and not SPANS(event.name)]


def kind_of(kernel: str) -> str:
    """The first of KINDS that a kernel's name matches."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def beside(ranks: Sequence[Mapping[str, float]]) -> str:
    """A table of what :meth:`Profile.kinds` found on each rank."""
    kinds = sorted({kind for rank in ranks for kind in rank}, key=lambda kind: -max(x.get(kind, 0) for x in ranks))
    lines = [[kind, *(f"{rank.get(kind, 0):.2f}" for rank in ranks)] for kind in kinds]
    return table(["ms a step", *(f"rank {number}" for number in range(len(ranks)))], lines)


def _spans(events: Sequence[Any]) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in events]


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """From the first begin to the last end."""
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def covered(spans: Sequence[tuple[Any, Any]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
