"""Measures for the GPU benchmarks: CUDA graphs, a flushed cache, the card's own ceilings, no figure for what is wrong.

GPU time is that of kernels in a CUDA graph, so launch gaps do not count; the second-level cache is flushed before each
repetition, by reading, and the time of flushing alone is taken off. Wall time is that of eager calls, gaps included.
After the deadline nothing is measured any more, what is being measured is interrupted, and every figure that is missing
says so.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from traceback import print_exc
from typing import Any

import torch
from torch import Tensor

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for a GPU
TOY = not torch.cuda.is_available()  # without a GPU everything runs tiny, to see that it runs; its times mean nothing
QUICK = bool(os.environ.get("CROSSPACK_BENCH_QUICK"))  # one small case of everything, to see that all of it runs
DEVICE = torch.device("cpu" if TOY else "cuda")
_deadline = float("inf")
_limit = float("inf")
_match = re.compile("")


def set_match(pattern: str) -> None:
    """From now on, only contenders whose name the pattern matches somewhere."""
    global _match
    _match = re.compile(pattern)


def wanted(contender: str) -> bool:
    return _match.search(contender) is not None


def set_budget(seconds: float) -> None:
    """From now on, contenders whose turn comes after ``seconds`` have no figure, nor one that runs then."""
    global _deadline
    _deadline = time.perf_counter() + seconds


def set_limit(seconds: float) -> None:
    """From now on, a contender that takes longer than that has no figure."""
    global _limit
    _limit = seconds


@contextmanager
def ending_within(seconds: float | None) -> Iterator[None]:
    """End the process after that time, whatever it waits for; contenders are interrupted a little earlier."""
    if seconds:
        set_budget(seconds - min(10.0, seconds / 10))
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def seconds_left() -> float:
    return _deadline - time.perf_counter()


@dataclass
class Result:
    """One measured figure, or the reason there is none.

    Attributes:
        section, case, contender: what was measured; what ran.
        value, unit: the figure; None if the contender failed or was wrong.
        note: error against the reference, or what went wrong.
    """

    section: str
    case: str
    contender: str
    value: float | None
    unit: str
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gated(
    check: Callable[[], float], limit: float | Callable[[], float], measure: Callable[[], dict[str, float]]
) -> tuple[dict[str, float], str]:
    """The figures of ``measure`` if ``check``, an error, is within ``limit``; no figure and the reason otherwise."""
    if seconds_left() < 0:
        return {}, "not run: out of time"
    try:
        with _interrupted_after(min(_limit, seconds_left())):
            limit = limit() if callable(limit) else limit
            error = check()
            if not error <= limit:
                return {}, f"WRONG: error {error:.1e}, where {limit:.1e} is allowed"
            return measure(), f"error {error:.1e}"
    except Exception as failure:  # a contender that fails is a line in the table
        print_exc()
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [""]
        # "backend='inductor' raised:" says nothing yet
        told = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        return {}, f"{type(failure).__name__}: {told[:160]}"


def failed(section: str, case: str, contender: str, unit: str, failure: Exception) -> Result:
    """A contender that fails is a line in the table: the first line of what it raised."""
    reason = next(iter(str(failure).strip().splitlines()), "")[:160]
    return Result(section, case, contender, None, unit, f"{type(failure).__name__}: {reason}")


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the code of the block after ``seconds``, and again if that code goes on."""
    if seconds == float("inf"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def relative_error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right; infinite if anything is not finite."""
    if not found.isfinite().all():
        return float("inf")
    return float((found.detach().double() - right.double()).norm() / right.double().norm())


def free() -> None:
    """Gives memory of contenders that are gone back to the GPU."""
    gc.collect()
    if not TOY:
        torch.cuda.empty_cache()


def synchronize() -> None:
    if not TOY:
        torch.cuda.synchronize()


def wall_ms(run: Callable[[], object], repeat: int = 20) -> float:
    """Milliseconds of an eager call, the median of ``repeat`` that follow each other without waiting in between."""
    run()
    times = []
    for _ in range(3):
        synchronize()
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        synchronize()
        times.append((time.perf_counter() - begin) / repeat * 1e3)
    return statistics.median(times)


def gpu_ms(run: Callable[[], object], repeat: int = 10) -> float:
    """Milliseconds on the GPU between events, launches queued ahead; for what is too long for gaps to matter."""
    if TOY:
        return wall_ms(run, 1)
    run()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeat)
    return statistics.median(times)


def graph_ms(run: Callable[[], object], repeat: int = 20) -> float:
    """Milliseconds of the kernels of ``run`` in a CUDA graph, each time with a flushed cache.

    What takes long is repeated less often.
    """
    if TOY:
        return wall_ms(run, 1)
    run()  # compiles
    repeat = max(3, min(repeat, int(40 / gpu_ms(run, 1))))

    def flushed() -> None:
        _flush()
        run()

    return _replay_ms(flushed, repeat) - _flush_ms(repeat)


def device_ms(run: Callable[[], object]) -> float:
    """As :func:`graph_ms`; where ``run`` cannot be captured, as :func:`gpu_ms`, launch gaps included."""
    try:
        return graph_ms(run)
    except RuntimeError:
        return gpu_ms(run)


def peak_gib(run: Callable[[], object]) -> float:
    """GiB that an eager call allocates at most, beyond what was held before; 0 without a GPU."""
    run()  # compiles, and makes what is kept
    if TOY:
        return 0.0
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def highest_gib() -> float:
    """GiB allocated at most since the last reset, those held before it included; 0 without a GPU."""
    return 0.0 if TOY else torch.cuda.max_memory_allocated() / 2**30


def waits(run: Callable[[], object]) -> int:
    """Returns how often the host waits for the GPU in one call; 0 without a GPU."""
    if TOY:
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Not the warning that this mode is a prototype, which a process has once.
    return sum("called a synchronizing" in str(w.message) for w in caught)


@cache
def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 2 GiB."""
    size = 2**16 if TOY else 2**30
    source = torch.randn(size, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_ms(lambda: target.copy_(source)) * 1e3


@cache
def matrix_rate() -> float:
    """Operations per second of a bfloat16 product of 8192 x 8192 random matrices."""
    size = 64 if TOY else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / gpu_ms(lambda: a @ b) * 1e3


@cache
def _flush_buffer() -> Tensor:
    return torch.ones(2**26, device=DEVICE)  # 256 MiB, four times the largest second-level cache


def _flush() -> None:
    _flush_buffer().sum()


@cache
def _flush_ms(repeat: int) -> float:
    return _replay_ms(_flush, repeat)


def _replay_ms(run: Callable[[], object], repeat: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            run()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeat)
    return statistics.median(times)
