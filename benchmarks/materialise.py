"""Measures how fast planned rows are made from ragged storage, beside a plain copy of the same bytes and other packers.

    python -m benchmarks.materialise                      # 1M documents, 267M int32 tokens: 6 GiB, a few minutes
    python -m benchmarks.materialise --documents 100000   # the same in seconds

One thread. Rows are asked for some at a time, as training does, so that one step's memory serves the next one too; "at
once" makes all rows in one new array, and so pays for its pages as well. The plan is made before the clock starts. The
other packers plan and copy in one call and take up to minutes, so they are given a tenth of the documents; what stands
beside them is ours with the planning in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks._report import best, machine, table, versions
from benchmarks.plan import lognormal
from packing_core import PackedBatch, PackedDataset, Ragged, plan

CAPACITY = 2048


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--documents", type=int, default=1_000_000)
    options.add_argument("--rows", type=int, default=256, help="rows of one step")
    options.add_argument("--repeat", type=int, default=5, help="the best of so many runs is reported")
    options.add_argument("--threads", type=int, default=1, help="also with so many threads that take steps in turn")
    options.add_argument("--no-peers", dest="peers", action="store_false")
    chosen = options.parse_args()

    lengths = lognormal(270, 0.9, chosen.documents, CAPACITY)
    values = np.random.default_rng(0).integers(1, 50_000, int(lengths.sum()), dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    made = plan(lengths, CAPACITY)
    sys.stdout.reconfigure(line_buffering=True)
    print(machine())
    print(versions("numpy", "pyarrow", "trl", "torchtune"))
    print(f"{made}, {chosen.rows} rows at a time, best of {chosen.repeat}\n")

    seconds = {"np.copyto of the same bytes": best(chosen.repeat, copyto(values))}
    for name, documents in forms(values, offsets):
        dataset = PackedDataset(documents, made)
        seconds[f"rows from {name}"] = best(chosen.repeat, lambda dataset=dataset: rows(dataset, chosen.rows))
        if chosen.threads > 1:
            said = f"rows from {name}, {chosen.threads} threads"
            seconds[said] = best(chosen.repeat, lambda dataset=dataset: rows(dataset, chosen.rows, chosen.threads))
    flat = PackedDataset(Ragged(values, offsets), made)
    seconds["at once from a flat buffer"] = best(chosen.repeat, lambda: flat[:])
    for name in ("position_ids", "targets", "segment_ids"):
        seconds[name] = derived(flat, name, chosen.rows, chosen.repeat)
    print_rates(seconds, len(values))
    if chosen.peers:
        del flat, documents, dataset
        few = max(1, chosen.documents // 10)
        print_rates(peers(values[: offsets[few]], offsets[: few + 1]), int(offsets[few]))


def forms(values: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[str, Any]]:
    """The same documents in every kind of storage, one after the other."""
    yield "a flat buffer", Ragged(values, offsets)
    with tempfile.TemporaryDirectory() as folder:
        Ragged(values, offsets).save(folder)
        yield "a memory map", Ragged.open(folder)
    try:
        import pyarrow as pa
    except ModuleNotFoundError:
        print("pyarrow is not installed: no rates from Arrow lists")
    else:
        yield "Arrow lists", pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
    yield "a list of arrays", [values[a:b].copy() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]


def copyto(values: np.ndarray) -> Callable[[], None]:
    out = np.ones_like(values)
    return lambda: np.copyto(out, values)


def rows(dataset: PackedDataset, count: int, threads: int = 1) -> None:
    def step(first: int) -> None:
        dataset[first : first + count]

    if threads == 1:
        for first in range(0, len(dataset), count):
            step(first)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(step, range(0, len(dataset), count)):
            pass


def derived(dataset: PackedDataset, name: str, count: int, repeat: int) -> float:
    """Best time of one derived array over all rows, the making of the rows not counted."""
    times = [0.0] * repeat
    for first in range(0, len(dataset), count):
        batch = dataset[first : first + count]
        for run in range(repeat):
            fresh: PackedBatch = batch[:]  # so that nothing cached by the run before is there
            begin = time.perf_counter()
            getattr(fresh, name)
            times[run] += time.perf_counter() - begin
    return min(times)


def peers(values: np.ndarray, offsets: np.ndarray) -> dict[str, float]:
    """Seconds that planning and copying take together."""
    lengths = np.diff(offsets)
    seconds = {"plan and rows, crosspack": best(3, lambda: rows(PackedDataset(Ragged(values, offsets), CAPACITY), 256))}
    documents = [values[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
    try:
        from datasets import Dataset
        from trl import pack_dataset
    except ModuleNotFoundError as missing:
        print(f"{missing.name} is not installed: no rate for TRL")
    else:
        import pyarrow as pa

        column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
        dataset = Dataset(pa.table({"input_ids": column}))
        options = {"keep_in_memory": True, "load_from_cache_file": False, "batch_size": len(lengths)}
        seconds["trl.pack_dataset, bfd"] = best(1, lambda: pack_dataset(dataset, CAPACITY, map_kwargs=options))
    try:
        from torchtune.datasets import PackedDataset as TorchtunePacked
    except ModuleNotFoundError as missing:
        print(f"{missing.name} is not installed: no rate for torchtune")
    else:
        samples = [{"tokens": tokens, "labels": tokens} for tokens in map(np.ndarray.tolist, documents)]
        seconds["torchtune PackedDataset"] = best(1, lambda: list(TorchtunePacked(samples, max_seq_len=CAPACITY)))
    return seconds


def print_rates(seconds: dict[str, float], tokens: int) -> None:
    first = next(iter(seconds.values()))
    lines = [[name, f"{s:.3f}", f"{tokens / s / 1e6:,.0f}", f"{s / first:.2f}"] for name, s in seconds.items()]
    print(table(["", "seconds", "Mtok/s", "ratio to the first"], lines))
    print()


if __name__ == "__main__":
    main()
