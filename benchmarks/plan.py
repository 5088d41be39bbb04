"""Measures the speed of planning and the fill of the rows, beside other packers on the same lengths in the same run.

    python -m benchmarks.plan            # a few minutes, most of them spent in other packers
    python -m benchmarks.plan --quick    # ours alone, up to a million documents
    python -m benchmarks.plan --real     # only all packers on four sets of real lengths, a minute

One thread, lengths as a NumPy array (as a list for packers that want one, made before the clock starts). Ours includes
checking the lengths and writing the shuffled plan; the others return lists of ids, or, for TRL, a table whose tokens it
has moved too. Packers whose time grows faster than the number of documents are given a tenth of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import best, machine, table, versions
from packing_core import plan

REAL = Path(__file__).parents[2] / "shared" / "data" / "token_lengths.npz"
REAL_SETS = (("gsm8k", 2048), ("gpteacher", 2048), ("python_source", 16_384), ("python_source", 65_536))
MILLION = 1_000_000
Packer = Callable[[np.ndarray, int], Callable[[], int]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="ours alone, up to a million documents")
    options.add_argument("--real", action="store_true", help="only the table of all packers on real lengths")
    options.add_argument("--repeat", type=int, default=15, help="the best of so many runs of ours is reported")
    chosen = options.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    peers = ("lightbinpack", "numba", "trl", "axolotl", "llamafactory", "megatron-bridge")
    print(machine(), versions("numpy", *peers), sep="\n", end="\n\n")
    if chosen.real:
        on_real_lengths(chosen.repeat)
        return
    for count, others in ((MILLION, FAST_PEERS), (MILLION // 10, SLOW_PEERS)):
        for name, lengths, capacity in distributions(count):
            packers = OURS | ({} if chosen.quick else others)
            race(f"{name}, {count:,} documents", lengths, capacity, packers, chosen.repeat)


def distributions(count: int) -> Iterator[tuple[str, np.ndarray, int]]:
    """Name, lengths [count] and capacity of the two sets."""
    yield "short lognormal", lognormal(270, 0.9, count, 2048), 2048
    yield "heavy tail", lognormal(3000, 1.3, count, 65_536), 65_536


def lognormal(mean: float, sigma: float, count: int, capacity: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, 1, capacity).astype(np.int64)


def race(
    case: str,
    lengths: np.ndarray,
    capacity: int,
    packers: Mapping[str, Packer],
    repeat: int,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Prints the time, the rows and the fill of each packer that is installed.

    Args:
        repeat: of ours; others run once.
    """
    lines, first = [], None
    for title, make in packers.items():
        try:
            packer = make(lengths, capacity)
        except ImportError as missing:
            lines.append([title, f"not installed ({missing.name})", "", "", ""])
            continue
        counts = list[int]()  # of rows, of each run

        def run(packer: Callable[[], int] = packer, counts: list[int] = counts) -> None:
            counts.append(packer())

        seconds = best(repeat if title in OURS else 1, run, clock)
        first, rows = first or seconds, counts[-1]
        fill = int(lengths.sum()) / (rows * capacity)
        lines.append([title, f"{seconds * 1e3:,.1f}", f"{seconds / first:.2f}", f"{rows:,}", f"{fill:.4f}"])
    print(table([case, "ms", "time, ratio to the first", "rows", "efficiency"], lines), end="\n\n")


def on_real_lengths(repeat: int) -> None:
    """The four sets of real documents, longer ones split before, by every packer, in processor time."""
    if not REAL.exists():
        print("real lengths: not at hand")
        return
    with np.load(REAL) as stored:
        for name, capacity in REAL_SETS:
            pieces = plan(stored[name], capacity, overflow="split", strategy="sequential", seed=None).length
            case = f"{name}, {len(pieces):,} pieces, {capacity:,}, processor time"
            race(case, pieces, capacity, OURS | SLOW_PEERS | PYTHON_PEERS, repeat, time.process_time)


# -- packers: each makes its inputs and warms up, and returns a function that packs and returns the number of rows


def _ours(lengths: np.ndarray, capacity: int, strategy: Any) -> Callable[[], int]:
    return lambda: plan(lengths, capacity, strategy=strategy).n_rows


def _lightbinpack(lengths: np.ndarray, capacity: int) -> Callable[[], int]:
    packer, numbers = import_module("lightbinpack").obfd, lengths.tolist()
    return lambda: len(packer(numbers, capacity))


def _trl(lengths: np.ndarray, capacity: int) -> Callable[[], int]:
    pa, packer = import_module("pyarrow"), import_module("trl.data_utils")._pack_bfd
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.uint8)))
    documents = pa.table({"input_ids": tokens})
    return lambda: len(packer(documents, capacity))


def _axolotl(lengths: np.ndarray, capacity: int) -> Callable[[], int]:
    packer = import_module("axolotl.utils.samplers.multipack").pack_parallel
    options = {"group_size": 100_000, "bin_size": 1_000_000, "num_processes": 1}
    packer(lengths[:100], capacity, **options)  # compiles
    return lambda: len(packer(lengths, capacity, **options))


def _llamafactory(lengths: np.ndarray, capacity: int) -> Callable[[], int]:
    module, numbers = _file_of("llamafactory", "data", "processor", "processor_utils.py"), lengths.tolist()
    return lambda: len(module.greedy_knapsack(list(numbers), capacity))


def _megatron_bridge(lengths: np.ndarray, capacity: int) -> Callable[[], int]:
    module, numbers = _file_of("megatron", "bridge", "data", "datasets", "packing_utils.py"), lengths.tolist()
    return lambda: len(module.first_fit_decreasing(numbers, capacity))


def _file_of(package: str, *path: str) -> Any:
    """A module that is plain Python, where the package around it wants much more to be imported."""
    spec = find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for place in places if (file := Path(place, *path)).exists()]
    if not files:
        raise ModuleNotFoundError(name=package)
    spec = spec_from_file_location("packer", files[0])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["packer"] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


OURS: dict[str, Packer] = {f"crosspack {s}": partial(_ours, strategy=s) for s in ("best_fit", "mixed")}
FAST_PEERS: dict[str, Packer] = {"lightbinpack obfd (C++)": _lightbinpack}
SLOW_PEERS: dict[str, Packer] = {
    "lightbinpack obfd (C++)": _lightbinpack,
    "TRL bfd, tokens moved too": _trl,
    "axolotl (numba)": _axolotl,
    "LLaMA-Factory knapsack": _llamafactory,
}
PYTHON_PEERS: dict[str, Packer] = {"Megatron Bridge first_fit_decreasing": _megatron_bridge}  # NeMo's is the same text


if __name__ == "__main__":
    main()
