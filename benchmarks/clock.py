"""Clocks of the GPU benchmarks: kernels in CUDA graphs, steps of training, memory, the card's ceilings, profiles.

GPU time is that of kernels in a CUDA graph, so launch gaps do not count; the second-level cache is flushed before each
repetition, by reading, and the time of flushing alone is taken off. Wall time is that of eager calls, gaps included.
Without a GPU everything runs tiny, to see that it runs; its times mean nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

if "--tiny" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for a GPU

import torch
from torch import Tensor

from benchmarks.report import machine, versions

TOY = not torch.cuda.is_available()
QUICK = bool(os.environ.get("CROSSPACK_BENCH_QUICK"))  # one small case of everything, to see that all of it runs
DEVICE = torch.device("cpu" if TOY else "cuda")
DTYPE = torch.float32 if TOY else torch.bfloat16


def header() -> str:
    """The lines above the figures: the card and its measured ceilings, the machine, the versions."""
    device = "no GPU: tiny sizes, times mean nothing" if TOY else torch.cuda.get_device_name()
    packages = versions("torch", "triton", "transformers", "flash-attn-4", "xformers", "liger-kernel")
    ceilings = f"copy {copy_bandwidth() / 1e12:.2f} TB/s, bfloat16 products {matrix_rate() / 1e12:.0f} TFLOP/s"
    return f"{device}; {machine()}\n{packages}\nmeasured ceilings: {ceilings}"


def synchronize() -> None:
    if not TOY:
        torch.cuda.synchronize()


def relative_error(x: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right; infinite if anything is not finite."""
    if not x.isfinite().all():
        return float("inf")
    return float((x.detach().double() - right.double()).norm() / right.double().norm())


# -- calls -------------------------------------------------------------------------------------------------------------


def once_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one call, for what takes seconds."""
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def wall_ms(run: Callable[[], object], repeat: int = 20) -> float:
    """Milliseconds of an eager call, the median of ``repeat`` that follow each other without waiting in between."""
    run()

    def calls() -> None:
        for _ in range(repeat):
            run()

    return statistics.median(once_ms(calls) / repeat for _ in range(3))


def gpu_ms(run: Callable[[], object], repeat: int | None = None) -> float:
    """Milliseconds on the GPU between events, launches queued ahead; for what is too long for gaps to matter.

    Args:
        repeat: calls between two events; as many as take 300 ms, ten at most, if None.
    """
    if TOY:
        return wall_ms(run, 1)
    run()
    if repeat is None:
        repeat = max(1, min(10, int(300 / once_ms(run))))
    return statistics.median(_between_events(run, repeat) for _ in range(3))


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
        return gpu_ms(run, 10)


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


# -- memory ------------------------------------------------------------------------------------------------------------


def reset_peak() -> None:
    if not TOY:
        torch.cuda.reset_peak_memory_stats()


def highest_gib() -> float:
    """GiB allocated at most since the last reset, those held before it included; 0 without a GPU."""
    return 0.0 if TOY else torch.cuda.max_memory_allocated() / 2**30


def allocated_gib() -> float:
    return 0.0 if TOY else torch.cuda.memory_allocated() / 2**30


def peak_gib(run: Callable[[], object]) -> float:
    """GiB that an eager call allocates at most, beyond what was held before; 0 without a GPU."""
    run()  # compiles, and makes what is kept
    synchronize()
    before = allocated_gib()
    reset_peak()
    run()
    return highest_gib() - before


# -- training ----------------------------------------------------------------------------------------------------------


def now() -> float:
    """Seconds of the clock on a GPU, and those of the process on a CPU, which others may load."""
    return time.process_time() if TOY else time.perf_counter()


class StepClock:
    """Times the steps of training after a warm-up, as a whole: by processor time where there is no GPU.

    Args:
        warm_up: steps before those that are timed.
        timed: steps.

    Attributes:
        first: seconds until the first step has ended, compiling included; ``before``: those of the warm-up.
        seconds: of the timed steps together.
        peak, timed_peak: GiB allocated at most, in all steps and in those that are timed.
    """

    def __init__(self, warm_up: int, timed: int) -> None:
        self.warm_up, self.timed, self.last = warm_up, timed, warm_up + timed
        self.first = self.before = self.seconds = self.peak = self.timed_peak = 0.0
        reset_peak()
        self.start()

    def start(self) -> None:
        """Counts seconds from here on, and not from the making of the clock."""
        self._began = now()

    def tick(self, step: int) -> None:
        """Call it after every step, counted from 1. It waits for the GPU, and for all ranks, three times in all."""
        if step not in (1, self.warm_up, self.last):
            return
        synchronize()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        passed, self.peak = now() - self._began, max(self.peak, highest_gib())
        if step == 1:
            self.first = passed
        if step == self.warm_up:
            self.before = passed
            reset_peak()
        if step == self.last:
            self.seconds, self.timed_peak = passed - self.before, highest_gib()

    def loop(self, step: Callable[[Any], Any], batches: Iterable[Any]) -> Any:
        """Takes every step, on as many of ``batches``; returns what the last one returned."""
        self.start()
        for number, batch in zip(range(1, self.last + 1), batches, strict=False):
            result = step(batch)
            self.tick(number)
        return result

    def in_timed(self, amounts: Sequence[float]) -> float:
        """The sum over the timed steps, which take batches of these amounts in turn."""
        return sum(amounts[step % len(amounts)] for step in range(self.warm_up, self.last))

    @property
    def ms(self) -> float:
        """Milliseconds of a timed step."""
        return self.seconds / self.timed * 1e3

    def callback(self, profiled: bool = False) -> Any:
        """A callback of transformers' trainers, which ticks.

        Args:
            profiled: profile the step after the last one.
        """
        from transformers import TrainerCallback

        clock, profile = self, Profile()

        class Ticks(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                clock.start()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.tick(state.global_step)
                if profiled and state.global_step == clock.last:
                    profile.__enter__()
                if profiled and state.global_step == clock.last + 1:
                    profile.__exit__()
                    print(profile, flush=True)

        return Ticks()


# -- the card's ceilings -----------------------------------------------------------------------------------------------


@cache
def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 2 GiB."""
    size = 2**16 if TOY else 2**30
    source = torch.randn(size, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_ms(lambda: target.copy_(source), 10) * 1e3


@cache
def matrix_rate() -> float:
    """Operations per second of a bfloat16 product of 8192 x 8192 random matrices."""
    size = 64 if TOY else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / gpu_ms(lambda: a @ b, 10) * 1e3


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
    return statistics.median(_between_events(graph.replay, 1) / repeat for _ in range(5))


def _between_events(run: Callable[[], object], repeat: int) -> float:
    """Milliseconds of one of ``repeat`` calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeat


# -- profiles ----------------------------------------------------------------------------------------------------------


class Profile:
    """A block under torch's profiler, printed after it ended: how long the GPU is busy, its gaps, its kernels."""

    def __enter__(self) -> Profile:
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
        busy, end, last = 0.0, spans[0][0] if spans else 0.0, "the block began"
        gaps, total = list[tuple[float, str, str]](), Counter[str]()
        for start, stop, name in spans:
            gaps.append((start - end, last, name))
            busy += max(0.0, stop - max(start, end))
            total[name] += stop - start
            if stop > end:
                end, last = stop, name
        lines = [f"{self.wall * 1e3:.0f} ms, GPU busy {busy / 1e3:.0f} ms ({busy / self.wall / 1e4:.0f}%)"]
        longest = sorted(gaps, reverse=True)[:12]
        lines += [f"  {gap / 1e3:.1f} ms between {before[:60]} and {name[:60]}" for gap, before, name in longest]
        lines += [f"  {time_us / 1e3:.1f} ms in {name[:100]}" for name, time_us in total.most_common(16)]
        return "\n".join(lines)
